"""Plans by the rules of others, and that the planner's are no worse."""

import dataclasses

import pytest

from hetero.cost.simulation.simulator import simulate
from hetero.plan.ir import Plan, Replica
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.initial_plan import published_residency
from hetero.planner.listed.listed_plans import best_plan
from hetero.planner.listed.offload_policies import POLICIES
from hetero.planner.problem import Problem
from hetero.planner.scoring import score_plan
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.unit.planner.clusters import planned
from tests.unit.planner.short_memory import problem


def asked(*, memory_gib: int, batch: int) -> Problem:
    """Llama-7B on one card, whose weights take 13 GiB."""
    node = dataclasses.replace(problem(memory_gib=memory_gib).cluster.node_types[0], gpus_per_node=1)
    return problem(batch=batch, cluster=ClusterSpec(node_types=(node,), links=Links()))


def placed(question: Problem, name: str) -> tuple[Plan, Offload]:
    """The best plan of a policy, and what its stage leaves to its host."""
    found = best_plan(POLICIES[name](question), question, Deadline(5.0, CountedWork()))
    assert found is not None
    (stage,) = found.plan.replicas[0].stages
    return found.plan, stage.offload


def test_zero_offload_leaves_all_updates_to_hosts_and_waits_for_them() -> None:
    _, offload = placed(asked(memory_gib=48, batch=1), "zero-offload")
    assert (offload.optimizer_from, offload.weights_from, offload.overlap) == (-1.0, None, False)


def test_patrickstar_leaves_no_room_for_another_layers_state() -> None:
    question = asked(memory_gib=48, batch=1)
    plan, offload = placed(question, "patrickstar")
    assert (offload.weights_from, offload.overlap) == (None, False)
    first = offload.optimizer_from
    assert first is not None
    assert first > 0
    more = dataclasses.replace(
        offload, optimizer_from=first + 1, gradients_from=None if offload.gradients_from is None else first + 1
    )
    assert score_plan(plan.with_replica(0, plan.replicas[0].with_stage(0, offload=more)), question) is None


def test_only_policies_that_stream_weights_train_where_these_do_not_fit() -> None:
    question = asked(memory_gib=12, batch=1)
    assert best_plan(POLICIES["zero-offload"](question), question, Deadline(5.0, CountedWork())) is None
    _, patrickstar = placed(question, "patrickstar")
    assert patrickstar.weights_from is not None
    assert not patrickstar.overlap
    _, stronghold = placed(question, "stronghold")
    assert stronghold.optimizer_from == stronghold.gradients_from == stronghold.weights_from is not None
    assert stronghold.overlap


@pytest.mark.parametrize("name", POLICIES)
def test_devices_without_the_precision_have_no_replica(name: str) -> None:
    """Llama-7B in bf16 on one card beside a V100, whose layers nobody has a price for."""
    link = Link(bandwidth_gb_per_s=12.0, latency_us=20.0)
    (card,) = asked(memory_gib=48, batch=1).cluster.node_types
    old = NodeType(name="old", device="V100-16", gpus_per_node=1)
    spec = ClusterSpec(node_types=(old, card), links=Links(between_nodes=link))
    plan, _ = placed(problem(batch=1, cluster=spec), name)
    assert [stage.ranks for _, _, stage in plan.stages()] == [(1,)]
    assert plan.idle_ranks == (0,)


@pytest.mark.slow
def test_the_best_plan_by_a_policy_is_an_initial_plan_where_memory_is_short() -> None:
    question = asked(memory_gib=48, batch=1)
    found = published_residency(question, Deadline(20.0, CountedWork()), beside=None)
    assert found is not None
    by_policy = [score_plan(placed(question, name)[0], question) for name in POLICIES]
    assert found.step_s == min(each.step_s for each in by_policy if each is not None)
    without = dataclasses.replace(question, offload="none")
    assert published_residency(without, Deadline(20.0, CountedWork()), beside=None) is None
    (stage,) = found.plan.replicas[0].stages
    kept = dataclasses.replace(stage, recompute="none", recompute_num_layers=None, offload=NOTHING_ON_HOST)
    roomy = dataclasses.replace(found, plan=found.plan.with_replica(0, Replica(num_samples=1, stages=(kept,))))
    assert published_residency(question, Deadline(20.0, CountedWork()), beside=roomy) is None, "memory is not short"


@pytest.mark.slow
@pytest.mark.rotates("batches", every=2, turn=0)
@pytest.mark.parametrize("batch", [4, 16])
def test_the_planner_is_at_least_as_good_as_the_policies(batch: int) -> None:
    question = asked(memory_gib=48, batch=batch)
    ours = planned(question, effort_s=2.0).simulation.step_s
    for name in POLICIES:
        plan, _ = placed(question, name)
        assert ours <= simulate(plan, question.topology, question.costs).step_s, name
