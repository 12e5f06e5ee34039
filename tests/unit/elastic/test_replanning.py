import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from hetero.cost.runtime_model import LaunchedRuntime
from hetero.elastic.planning_problem import PlanningProblem, present_cluster
from hetero.elastic.records import EpochNode, NodeInfo
from hetero.elastic.replanning import (
    PlanTable,
    kept_step_s,
    plan_for,
    predicted_step_s,
    replan,
    single_losses,
    with_replicas_left,
)
from hetero.elastic.stragglers import with_slower_type
from hetero.errors import ConfigError, PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.validate import validate
from hetero.serialization import from_json, to_json
from hetero.spec.cluster import ClusterSpec, Links, NodePair, NodeType, ZonePair
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import profile

MODEL = gpt2_model(num_layers=4)
LINK = Link(bandwidth_gb_per_s=10, latency_us=10)
FAST = NodeType(name="fast", device="A100-40", gpus_per_node=2, count=2, zone="a", inside_node=LINK)
SLOW = NodeType(name="slow", device="V100-16", gpus_per_node=1, count=2, zone="b", inside_node=LINK)
CLUSTER = ClusterSpec(
    node_types=(FAST, SLOW),
    links=Links(
        between_nodes=LINK,
        node_pairs=(NodePair(node_types=("fast", "fast"), link=LINK), NodePair(node_types=("slow", "slow"), link=LINK)),
        zone_pairs=(ZonePair(zones=("a", "b"), link=LINK),),
    ),
)


def problem(cluster: ClusterSpec = CLUSTER, **changes: Any) -> PlanningProblem:
    return PlanningProblem(
        **{
            "cluster": cluster,
            "model": MODEL,
            "seq_length": 16,
            "precision": "fp32",
            "global_batch_size": 24,
            "distributed_optimizer": False,
            "splits_backward": True,
            "runtime": LaunchedRuntime(),
            "profiles": (
                profile(MODEL, block_s=(0.1, 0.2)),
                profile(MODEL, device="V100-16", block_s=(0.2, 0.4)),
            ),
            "time_limit_s": 5.0,
            **changes,
        }
    )


def node(name: str, node_type: str = "fast", num_ranks: int = 2) -> NodeInfo:
    return NodeInfo(
        name=name,
        incarnation="1",
        node_type=node_type,
        num_ranks=num_ranks,
        host="127.0.0.1",
        port=1,
        failure_domain=name,
        settings="same",
    )


ALL = [node("f0"), node("f1"), node("s0", "slow", 1), node("s1", "slow", 1)]


def on_ranks(nodes: Sequence[NodeInfo]) -> list[EpochNode]:
    firsts = itertools.accumulate((each.num_ranks for each in nodes), initial=0)
    return [
        EpochNode(node=each, ranks=tuple(range(first, first + each.num_ranks)))
        for each, first in zip(nodes, firsts, strict=False)
    ]


def four_replicas() -> Plan:
    """A replica on each node: two stages on those with two devices."""
    two = [
        replica(
            stage(layers=(0, 2), ranks=[first], device="A100-40"),
            stage(layers=(2, 4), ranks=[first + 1], device="A100-40"),
            num_samples=8,
        )
        for first in (0, 2)
    ]
    alone = [replica(stage(layers=(0, 4), ranks=[rank], device="V100-16"), num_samples=4) for rank in (4, 5)]
    return plan(MODEL, two + alone)


def legal_on(made: Plan, counts: dict[str, int]) -> bool:
    validate(made)
    check_plan_on_cluster(made, present_cluster(CLUSTER, counts))
    return True


def test_the_present_cluster_has_the_counts_and_the_links_that_are_left() -> None:
    assert present_cluster(CLUSTER, {"fast": 2, "slow": 2}) == CLUSTER
    names = {"fast": ("f0", "f1"), "slow": ("s0", "s1")}
    named = [dataclasses.replace(each, nodes=names[each.name]) for each in CLUSTER.node_types]
    fewer = present_cluster(dataclasses.replace(CLUSTER, node_types=tuple(named)), {"fast": 1, "slow": 2})
    assert [each.nodes for each in fewer.node_types] == [(), ()], "it is not known which node is left"
    left = present_cluster(CLUSTER, {"fast": 3, "slow": 0})
    assert [(each.name, each.count) for each in left.node_types] == [("fast", 3)]
    assert (left.links.zone_pairs, len(left.links.node_pairs)) == ((), 1)
    with pytest.raises(PlanError, match=r"no node is there; one of type fast or slow has to come"):
        present_cluster(CLUSTER, {})
    with pytest.raises(ConfigError, match=r"no node type 'fats' \(did you mean 'fast'\?\)"):
        present_cluster(CLUSTER, {"fats": 1})


def test_a_problem_travels_as_json() -> None:
    asked = problem()
    assert from_json(PlanningProblem, to_json(asked), source="a test") == asked


def test_nodes_are_counted_by_type() -> None:
    assert problem().counts_of(ALL[1:]) == {"fast": 1, "slow": 2}
    with pytest.raises(
        ConfigError, match=r"node x: the cluster file has no node type 'slwo' \(did you mean 'slow'\?\)"
    ):
        problem().counts_of([node("x", "slwo")])
    with pytest.raises(ConfigError, match=r"node x: it starts 3 ranks, a node of type 'slow' has gpus_per_node 1"):
        problem().counts_of([node("x", "slow", 3)])


def test_there_are_as_many_single_losses_as_node_types() -> None:
    assert list(single_losses({"fast": 2, "slow": 5})) == [{"fast": 1, "slow": 5}, {"fast": 2, "slow": 4}]
    assert list(single_losses({"fast": 1, "slow": 0})) == []


def test_a_table_says_what_it_lacks() -> None:
    table = PlanTable()
    left, right = table.missing({"fast": 2, "slow": 1})
    assert (left, right) == ({"fast": 1, "slow": 1}, {"fast": 2, "slow": 0})
    table.put(left, four_replicas())
    table.put({"fast": 2}, None)
    assert table.missing({"fast": 2, "slow": 1}) == []
    assert table.get({"slow": 1, "fast": 1}) == four_replicas()
    assert table.get(right) is None


def test_hit_replicas_are_dropped_and_the_others_take_their_samples() -> None:
    left = with_replicas_left(problem(), four_replicas(), on_ranks(ALL), [ALL[0], ALL[2], ALL[3]])
    assert left is not None
    assert legal_on(left, {"fast": 1, "slow": 2})
    assert [each.stages[0].ranks for each in left.replicas] == [(0,), (2,), (3,)]
    assert sum(each.num_samples for each in left.replicas) == 24
    # One device of the fast type takes half the time of a slow one, and the pipeline has two.
    fast, *slow = [each.num_samples for each in left.replicas]
    assert fast > 2 * max(slow)
    assert left.idle_ranks == ()


def test_a_node_whose_replica_was_hit_idles() -> None:
    across = plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 2), ranks=[0], device="A100-40"),
                stage(layers=(2, 4), ranks=[2], device="A100-40"),
                num_samples=16,
            ),
            replica(
                stage(layers=(0, 2), ranks=[1], device="A100-40"),
                stage(layers=(2, 4), ranks=[4], device="V100-16"),
                num_samples=8,
            ),
        ],
        idle_ranks=(3, 5),
    )
    across = dataclasses.replace(across, gradient_sync=GradientSyncPlan(domains=((0, 1, 2, 3), (4, 5))))
    left = with_replicas_left(problem(), across, on_ranks(ALL), [ALL[0], ALL[2], ALL[3]])
    assert left is not None
    assert legal_on(left, {"fast": 1, "slow": 2})
    assert ([each.num_samples for each in left.replicas], left.idle_ranks) == ([24], (0, 3))
    assert left.gradient_sync.domains == ((0, 1), (2, 3))


def test_no_plan_is_left_if_every_replica_was_hit() -> None:
    one = plan(
        MODEL,
        [replica(stage(layers=(0, 4), ranks=[0, 1], dp=2, device="A100-40"), num_samples=24)],
        idle_ranks=(2, 3, 4, 5),
    )
    assert with_replicas_left(problem(), one, on_ranks(ALL), ALL[1:]) is None


def test_a_plan_that_is_kept_is_as_slow_as_the_slowest_node_of_each_stage() -> None:
    fast = [ALL[0], ALL[1]]
    asked, slower = with_slower_type(problem(), "fast", 2.0), dataclasses.replace(ALL[1], node_type="fast-slower-2")
    across = plan(MODEL, [replica(stage(layers=(0, 4), ranks=range(4), dp=4, device="A100-40"), num_samples=24)])
    asked = dataclasses.replace(asked, global_batch_size=24)
    step_s = predicted_step_s(asked, fast, table_of(across, fast=2))
    assert step_s is not None
    assert kept_step_s(asked, across, on_ranks(fast), fast) == pytest.approx(step_s)
    assert kept_step_s(asked, across, on_ranks(fast), [ALL[0], slower]) == pytest.approx(2 * step_s, rel=0.01)
    assert kept_step_s(asked, across, on_ranks(fast), [slower, *ALL[2:]]) is None
    # It may be worth another plan, which is told from one that is not by the same measure.
    found = replan(asked, [ALL[0], slower], present=(across, on_ranks(fast)), table=PlanTable(), held={})
    assert found.kept_s == pytest.approx(2 * step_s, rel=0.01)
    assert found.step_s < 0.8 * found.kept_s
    assert set(found.busy_s) == {0, 1, 2, 3}


def test_a_node_that_is_fast_again_makes_a_kept_plan_faster() -> None:
    asked, slower = with_slower_type(problem(), "fast", 2.0), dataclasses.replace(ALL[1], node_type="fast-slower-2")
    # Both nodes have as much to do, so that the step waits for the slower one.
    first = stage(layers=(0, 2), ranks=[0, 1], dp=2, device="A100-40")
    second = stage(layers=(2, 4), ranks=[2, 3], dp=2, device="A100-40-slower-2")
    made = plan(MODEL, [replica(first, second, num_samples=24)])
    before = on_ranks([ALL[0], slower])
    then, now = (kept_step_s(asked, made, before, [ALL[0], node]) for node in (slower, ALL[1]))
    assert then is not None
    assert now is not None
    assert now < then


def table_of(made: Plan, **counts: int) -> PlanTable:
    table = PlanTable()
    table.put(counts, made)
    return table


def test_as_many_nodes_of_each_type_keep_the_plan() -> None:
    back = [*ALL[:3], node("s9", "slow", 1)]
    found = replan(problem(), back, present=(four_replicas(), on_ranks(ALL)), table=PlanTable(), held={})
    assert (found.origin, found.plan) == ("unchanged", four_replicas())
    assert [each.node.name for each in found.placed.nodes] == ["f0", "f1", "s0", "s9"]


@pytest.mark.slow
def test_the_fastest_of_three_plans_is_taken_after_a_loss() -> None:
    asked, table, left = problem(), PlanTable(), {"fast": 1, "slow": 2}
    on_fast = replica(stage(layers=(0, 4), ranks=[0, 1], dp=2, device="A100-40"), num_samples=24)
    table.put(left, plan(MODEL, [on_fast], idle_ranks=(2, 3)))
    # Half a second is enough for a plan on a quiet machine.
    found = replan(
        asked, [ALL[1], *ALL[2:]], present=(four_replicas(), on_ranks(ALL)), table=table, held={}, solve_s=5.0
    )
    assert legal_on(found.plan, left)
    assert {found.origin, *found.others} == {"made ahead", "fewer replicas", "solved"}
    assert found.step_s <= min(found.others.values())
    assert found.origin in found.reason()
    assert "fewer replicas" in found.reason()


def step_s_of(asked: PlanningProblem, nodes: Sequence[NodeInfo], made: Plan) -> float:
    table = PlanTable()
    table.put(asked.counts_of(nodes), made)
    found = predicted_step_s(asked, nodes, table)
    assert found is not None
    return found


def test_the_present_plan_is_bettered_and_never_worsened() -> None:
    asked = problem()
    found = plan_for(asked, {"fast": 2, "slow": 2}, time_limit_s=1.0, start_from=four_replicas())
    assert step_s_of(asked, ALL, found) <= step_s_of(asked, ALL, four_replicas())


@pytest.mark.slow
def test_a_join_promises_what_the_simulator_says() -> None:
    asked, table = problem(), PlanTable()
    few = predicted_step_s(asked, ALL[:1], table)
    more = predicted_step_s(asked, ALL[:2], table)
    assert few is not None
    assert more is not None
    # Twice the devices: hardly less than twice the samples per second, and never more.
    assert 1.6 < few / more < 2.01
    assert table.knows({"fast": 1})
    # What a table has is not asked for again.
    table.put({"fast": 1}, None)
    assert predicted_step_s(asked, ALL[:1], table) is None


@pytest.mark.slow
def test_a_model_that_does_not_fit_says_what_would_be_enough() -> None:
    """48 layers of 51 million parameters at 16 bytes: 38 GiB, on 16 there and 160 that the cluster file has besides."""
    large = gpt2_model(num_layers=48, hidden_size=2048, num_attention_heads=16, num_query_groups=16, kv_channels=128)
    large = dataclasses.replace(large, ffn_hidden_size=8192, max_position_embeddings=2048)
    asked = problem(model=large, data_sheets=True, profiles=(), seq_length=512)
    with pytest.raises(PlanError, match=r"with 1 x slow: .*does not fit.*enough would be 1 more of type fast") as error:
        replan(asked, ALL[3:], present=None, table=PlanTable(), held={})
    assert "more of type slow" not in str(error.value)
    assert replan(asked, [ALL[0], ALL[3]], present=None, table=PlanTable(), held={}).step_s > 0


def test_a_model_that_is_too_large_for_the_whole_cluster_says_so() -> None:
    large = gpt2_model(num_layers=400, hidden_size=2048, num_attention_heads=16, num_query_groups=16, kv_channels=128)
    large = dataclasses.replace(large, ffn_hidden_size=8192, max_position_embeddings=2048)
    asked = problem(model=large, data_sheets=True, profiles=(), seq_length=512)
    with pytest.raises(PlanError, match="no one type of the cluster file has enough nodes"):
        plan_for(asked, {"slow": 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"model": gpt2_model(num_layers=6)},
        {"seq_length": 8},
        {"global_batch_size": 48},
        {"precision": "bf16"},
        {"distributed_optimizer": True},
        {"runtime": LaunchedRuntime(hidden_dropout=0.1)},
    ],
)
def test_a_plan_is_kept_for_the_same_run_alone(changes: dict[str, Any]) -> None:
    """The flags of a job may change when it goes on after an end."""
    made = replan(problem(), [node("a"), node("b")], present=None, table=PlanTable(), held={}).plan
    assert problem().is_answered_by(made)
    assert not problem(**changes).is_answered_by(made)
