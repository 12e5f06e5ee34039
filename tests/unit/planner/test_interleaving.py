"""Several stages per device group of finished plans: tried where they can help, kept where they do and fit."""

from functools import partial

import pytest

from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.plan.ir import Replica
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.planner import scoring
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve import interleaving
from hetero.planner.improve.half_layer_moves import levelled, with_half_layers_moved
from hetero.planner.improve.interleaving import interleave, interleaved
from hetero.planner.scoring import Shortlist
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.cases import slow
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, profile
from tests.unit.planner import line
from tests.unit.planner.clusters import planned
from tests.unit.planner.line import MODEL, score_of

line_problem, uniform = partial(line.line_problem, batch=8), partial(line.uniform, batch=8)


def layers_of(pipeline: Replica) -> list[float]:
    return [each.num_layers for each in pipeline.stages]


def test_two_stages_per_group_fill_in_half_the_time() -> None:
    problem = line_problem()
    whole = score_of(uniform(pp=4), problem)
    found = interleave(Shortlist(whole), problem, Deadline(30, CountedWork()))
    validate(found.plan)
    (pipeline,) = found.plan.replicas
    assert pipeline.device_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    microbatch_s = whole.simulation.costs[0, 0].microbatch_s
    assert whole.step_s - found.step_s == pytest.approx(3 * microbatch_s / 2, rel=1e-3)


def test_the_best_of_all_finalists_is_interleaved() -> None:
    problem = line_problem()
    plans = [score_of(uniform(pp=pp), problem) for pp in (4, 2)]
    alone = [interleave(Shortlist(each), problem, Deadline(30, CountedWork())).step_s for each in plans]
    best = interleave(Shortlist(plans[0], tuple(plans)), problem, Deadline(30, CountedWork()))
    assert best.step_s == pytest.approx(min(alone), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        ({"interleaves": False}, 30),
        ({}, 0),
        ({"costs": cost_model(MODEL, [profile(MODEL)], runtime=DEEPSPEED)}, 30),
    ],
    ids=["forbidden", "no time", "another runtime"],
)
def test_the_plan_stays(options: dict[str, object], limit_s: float) -> None:
    problem = line_problem(**options)
    whole = score_of(uniform(pp=4), problem)
    assert interleave(Shortlist(whole), problem, Deadline(limit_s, CountedWork())) is whole


@pytest.mark.parametrize("shape", [{}, {"pp": 4, "global_batch_size": 1024}], ids=["no pipeline", "many microbatches"])
def test_where_little_can_be_gained_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, shape: dict[str, object]) -> None:
    """Four stages idle for 3 of 1,027 microbatches; of these three stages per group save two thirds, or 0.2 %."""
    problem = line_problem(global_batch_size=shape.get("global_batch_size", 8))
    whole = score_of(uniform(**shape), problem)
    monkeypatch.delattr(interleaving, "score_plan")
    assert interleave(Shortlist(whole), problem, Deadline(30, CountedWork())) is whole


@pytest.mark.parametrize("apart", [1, 2])
def test_devices_hold_all_of_their_stages(monkeypatch: pytest.MonkeyPatch, apart: int) -> None:
    """Where just the smaller depths fit, these are taken; and none where a device holds no more than one stage's."""
    problem = line_problem()
    whole = score_of(uniform(pp=4), problem)
    pipeline = interleaved(whole.plan.replicas[0], 2, apart=apart)
    assert pipeline is not None
    made = whole.plan.with_replica(0, pipeline)
    capacity = max(parts.total for parts in device_memory(made, plan_memory(made, problem.costs)).values())
    monkeypatch.setattr(scoring, "capacity_bytes", lambda *_: capacity)
    found = interleave(Shortlist(whole), problem, Deadline(30, CountedWork()))
    assert max(parts.total for parts in device_memory(found.plan, found.memory).values()) <= capacity
    assert found.plan.replicas[0].is_interleaved
    capacity = max(parts.total for parts in whole.memory.values())
    assert interleave(Shortlist(whole), problem, Deadline(30, CountedWork())) is whole


def test_layers_are_cut_as_evenly_as_they_can_be_and_the_head_has_the_shorter_part() -> None:
    pipeline = replica(stage(layers=(0, 5), ranks=(0,)), stage(layers=(5, 8), ranks=(1,)), num_samples=4)
    found = interleaved(pipeline, 2, apart=2)
    assert found is not None
    assert layers_of(found) == [2, 2, 3, 1]
    assert [each.ranks for each in found.stages] == [(0,), (1,), (0,), (1,)]
    assert interleaved(pipeline, 4, apart=2) is None, "the second group has three layers"
    assert interleaved(found, 2, apart=2) is None
    halves = replica(stage(layers=(0, 2.5), ranks=(0,)), stage(layers=(2.5, 8), ranks=(1,)), num_samples=4)
    found = interleaved(halves, 2, apart=2)
    assert found is not None
    assert layers_of(found) == [1, 3, 1.5, 2.5]
    validate(plan(MODEL, [found]))


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_warm_ups(apart: int) -> None:
    """Three groups of two stages: apart x (p - r - 1) + (v - 1) p + 1."""
    (pipeline,) = uniform_plan(
        UniformLayout(
            model=gpt2_model(num_layers=6, tied_embeddings=False),
            world_size=3,
            pp=3,
            micro_batch_size=1,
            global_batch_size=12,
            seq_length=16,
            device="A100-40",
        )
    ).replicas
    found = interleaved(pipeline, 2, apart=apart)
    assert found is not None
    warm_ups = [sum(found.stages[s].in_flight for s in group) for group in found.device_groups]
    assert warm_ups == [apart * (3 - r - 1) + 3 + 1 for r in range(3)]


def test_unlike_microbatches_warm_up_with_the_samples_of_the_largest() -> None:
    pipeline = replica(stage(layers=(0, 4), ranks=(0,), mbs=1), stage(layers=(4, 8), ranks=(1,), mbs=4), num_samples=32)
    found = interleaved(pipeline, 2, apart=2)
    assert found is not None
    assert [sum(found.stages[s].in_flight for s in group) for group in found.device_groups] == [20, 3]
    validate(plan(MODEL, [found]))


def test_what_a_stage_recomputes_and_puts_off_is_shared_out() -> None:
    stages = (
        stage(layers=(0, 4), ranks=(0,), recompute="full", recompute_num_layers=3),
        stage(layers=(4, 8), ranks=(1,), delay=2),
    )
    found = interleaved(replica(*stages, num_samples=8), 2, apart=2)
    assert found is not None
    assert [each.recompute_num_layers for each in found.stages] == [2, None, 2, None]
    assert [each.wgrad_delay for each in found.stages] == [None, 0, None, 0]
    validate(plan(MODEL, [found]))


def test_half_layers_are_left_to_pipelines_of_one_stage_per_group() -> None:
    problem = line_problem()
    (pipeline,) = uniform(pp=2, world_size=2).replicas
    made = interleaved(pipeline, 2, apart=2)
    assert made is not None
    described = plan(MODEL, [made])
    assert levelled(described, problem) is None
    assert not list(with_half_layers_moved(described, problem))


def test_an_interleaved_replica_has_another_shape() -> None:
    (pipeline,) = uniform(pp=2, world_size=2).replicas
    made = interleaved(pipeline, 2, apart=2)
    assert made is not None
    assert made.shape != made.with_each_stage(ranks=[(s,) for s in range(len(made.stages))]).shape


@pytest.mark.parametrize("interleaves", [False, *slow(True)])
def test_a_search_ends_with_interleaved_stages_where_they_may_be(interleaves: bool) -> None:
    """Devices that hold no more than half of the model, and one microbatch for each of them."""
    model = gpt2_model(
        num_layers=8, tied_embeddings=False, hidden_size=2048, kv_channels=512, ffn_hidden_size=8192,
    )  # fmt: skip
    node = NodeType(name="node", device="A100-40", gpus_per_node=1, count=4, memory_gib=6)
    links = Links(between_nodes=Link(bandwidth_gb_per_s=1e3, latency_us=1.0))
    problem = line_problem(
        cluster=ClusterSpec(node_types=(node,), links=links),
        costs=cost_model(model, [profile(model)]),
        global_batch_size=4,
        interleaves=interleaves,
    )
    found = planned(problem, effort_s=1)
    validate(found.plan)
    assert found.plan.replicas[0].is_interleaved == interleaves
