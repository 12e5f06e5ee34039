"""Domains and bucket sizes: hierarchical for a slow link between zones, flat and nothing else inside a node."""

import dataclasses

import pytest

from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.validate import validate
from hetero.planner.deadline import Deadline
from hetero.planner.improve.gradient_sync import choose_gradient_sync
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, score_plan
from hetero.spec.cluster import ClusterSpec, Link, Links, NodeType, ZonePair
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, profile
from tests.unit.planner.clusters import planned

MODEL = gpt2_model(num_layers=6, tied_embeddings=False)
GRADIENTS_GB = 4 * 2 * (64 * 32 + 6 * 8544) / 1e9
NODE = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)


def zones(count: int, *, gpus_per_node: int = 2, nodes_per_zone: int = 1, seconds: float = 1.0) -> ClusterSpec:
    """Between zones the gradients of two models take so many seconds, inside next to nothing."""
    types = tuple(
        NodeType(
            name=f"node-{z}",
            device="A100-40",
            gpus_per_node=gpus_per_node,
            count=nodes_per_zone,
            zone=f"zone-{z}",
            inside_node=NODE,
        )
        for z in range(count)
    )
    slow = Link(bandwidth_gb_per_s=GRADIENTS_GB / seconds, latency_us=0.0)
    pairs = tuple(
        ZonePair(zones=(f"zone-{a}", f"zone-{b}"), link=slow) for a in range(count) for b in range(a + 1, count)
    )
    return ClusterSpec(node_types=types, links=Links(between_nodes=NODE, zone_pairs=pairs))


def problem(spec: ClusterSpec, **options: object) -> Problem:
    costs = cost_model(MODEL, [profile(MODEL, block_s=(0.01, 0.02), micro_batch_sizes=(1, 2, 4, 8))])
    fields = {"global_batch_size": 8, **options}
    return Problem(cluster=spec, costs=costs, **fields)  # type: ignore[arg-type]


def data_parallel(ranks: int) -> Plan:
    made = plan(MODEL, [replica(stage(layers=(0, 6), ranks=range(ranks), dp=ranks, device="A100-40"), num_samples=8)])
    return dataclasses.replace(made, global_batch_size=8)


def score_of(made: Plan, question: Problem) -> ScoredPlan:
    found = score_plan(made, question)
    assert found is not None
    return found


def test_two_zones_with_a_slow_link_sum_in_two_levels() -> None:
    question = problem(zones(2, gpus_per_node=4))
    start = score_of(data_parallel(8), question)
    better = choose_gradient_sync(Shortlist(start), question, Deadline(30))
    assert better.plan.gradient_sync.domains == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert better.step_s < 0.75 * start.step_s
    assert better == score_of(better.plan, question)
    validate(better.plan)


def test_zones_of_several_nodes_are_domains_as_a_whole() -> None:
    """Four nodes would cross the slow link with three times their gradients and a half, two zones with one."""
    question = problem(zones(2, nodes_per_zone=2))
    better = choose_gradient_sync(Shortlist(score_of(data_parallel(8), question)), question, Deadline(30))
    assert better.plan.gradient_sync.domains == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_on_one_node_all_is_as_it_was() -> None:
    question = problem(zones(1, gpus_per_node=4))
    start = score_of(data_parallel(4), question)
    assert start.simulation.syncs[-1].end_s > start.simulation.compute_end_s
    assert choose_gradient_sync(Shortlist(start), question, Deadline(30)) is start


def test_one_rank_per_zone_has_nothing_to_sum_inside() -> None:
    question = problem(zones(4, gpus_per_node=1))
    better = choose_gradient_sync(Shortlist(score_of(data_parallel(4), question)), question, Deadline(30))
    assert better.plan.gradient_sync.domains == ()


def test_small_buckets_hide_behind_the_backward_of_the_layers_below() -> None:
    """With one bucket for the whole model nothing is summed before the last backward has ended."""
    question = problem(zones(2, seconds=0.05))
    whole = dataclasses.replace(data_parallel(4), gradient_sync=GradientSyncPlan(bucket_numel=10**9))
    start = score_of(whole, question)
    sizes = [10**4, 10**9]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.planner.improve.gradient_sync.BUCKET_NUMELS", sizes)
        better = choose_gradient_sync(Shortlist(start), question, Deadline(30))
    assert better.plan.gradient_sync.bucket_numel == 10**4
    assert better.step_s < start.step_s


def test_sizes_below_a_layer_are_told_apart() -> None:
    """A layer has 8544 elements: 8000 hold back its MLP's until its attention has its gradients, 4000 do not."""
    question = problem(zones(2, seconds=0.05))
    whole = dataclasses.replace(data_parallel(4), gradient_sync=GradientSyncPlan(bucket_numel=8000))
    start = score_of(whole, question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.planner.improve.gradient_sync.BUCKET_NUMELS", [4000])
        better = choose_gradient_sync(Shortlist(start), question, Deadline(30))
    assert better.plan.gradient_sync.bucket_numel == 4000
    assert better.step_s < start.step_s
    assert len(better.simulation.syncs) > len(start.simulation.syncs)


def test_without_time_the_plan_stays() -> None:
    question = problem(zones(2))
    start = score_of(data_parallel(4), question)
    assert choose_gradient_sync(Shortlist(start), question, Deadline(0)) is start


def test_the_planner_sums_in_two_levels_between_zones_and_in_one_in_a_node() -> None:
    apart = planned(problem(zones(2, gpus_per_node=4, seconds=0.01)))
    assert len(apart.plan.gradient_sync.domains) == 2
    together = planned(problem(zones(1, gpus_per_node=4)))
    assert together.plan.gradient_sync == GradientSyncPlan()
