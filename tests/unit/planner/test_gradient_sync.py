"""Domains and bucket sizes: hierarchical for a slow link between zones, flat and nothing else inside a node."""

import dataclasses

import pytest

from hetero.plan.communicators import PlanCommunicators
from hetero.plan.ir import GradientSyncPlan
from hetero.plan.validate import validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.gradient_sync import choose_gradient_sync
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist
from tests.unit.planner.clusters import planned
from tests.unit.planner.line import score_of
from tests.unit.planner.slow_zones import data_parallel, problem, zones


def chosen(start: ScoredPlan, question: Problem) -> ScoredPlan:
    return choose_gradient_sync(Shortlist(start), question, Deadline(30, CountedWork()))


def test_two_zones_with_a_slow_link_sum_hierarchically() -> None:
    question = problem(zones(2, gpus_per_node=4))
    start = score_of(data_parallel(8), question)
    better = chosen(start, question)
    assert better.plan.gradient_sync.domains == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert better.step_s < 0.75 * start.step_s
    assert better == score_of(better.plan, question)
    validate(better.plan)


def test_domains_do_not_put_ranks_into_too_many_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    question = problem(zones(2, gpus_per_node=4))
    start = score_of(data_parallel(8), question)
    most = max(PlanCommunicators(start.plan).counts().values())
    monkeypatch.setattr("hetero.plan.communicators.max_communicators", lambda _: most)
    assert chosen(start, question).plan.gradient_sync.domains == ()


def test_zones_of_several_nodes_are_domains_as_a_whole() -> None:
    """Four nodes would cross the slow link with three times their gradients and a half, two zones with one."""
    question = problem(zones(2, nodes_per_zone=2))
    better = chosen(score_of(data_parallel(8), question), question)
    assert better.plan.gradient_sync.domains == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_on_one_node_all_is_as_it_was() -> None:
    question = problem(zones(1, gpus_per_node=4))
    start = score_of(data_parallel(4), question)
    assert start.simulation.syncs[-1].end_s > start.simulation.compute_end_s
    assert chosen(start, question) is start


def test_one_rank_per_zone_has_nothing_to_sum_inside() -> None:
    question = problem(zones(4, gpus_per_node=1))
    better = chosen(score_of(data_parallel(4), question), question)
    assert better.plan.gradient_sync.domains == ()


def test_small_buckets_hide_behind_the_backward_of_the_layers_below() -> None:
    """With one bucket for the whole model nothing is summed before the last backward has ended."""
    question = problem(zones(2, seconds=0.05))
    whole = dataclasses.replace(data_parallel(4), gradient_sync=GradientSyncPlan(bucket_numel=10**9))
    start = score_of(whole, question)
    sizes = [10**4, 10**9]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.planner.improve.gradient_sync.BUCKET_NUMELS", sizes)
        better = chosen(start, question)
    assert better.plan.gradient_sync.bucket_numel == 10**4
    assert better.step_s < start.step_s


def test_sizes_below_a_layer_are_told_apart() -> None:
    """A layer has 8544 elements: 8000 hold back its MLP's until its attention has its gradients, 4000 do not."""
    question = problem(zones(2, seconds=0.05))
    whole = dataclasses.replace(data_parallel(4), gradient_sync=GradientSyncPlan(bucket_numel=8000))
    start = score_of(whole, question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.planner.improve.gradient_sync.BUCKET_NUMELS", [4000])
        better = chosen(start, question)
    assert better.plan.gradient_sync.bucket_numel == 4000
    assert better.step_s < start.step_s
    assert len(better.simulation.syncs) > len(start.simulation.syncs)


def test_without_time_the_plan_stays() -> None:
    question = problem(zones(2))
    start = score_of(data_parallel(4), question)
    assert choose_gradient_sync(Shortlist(start), question, Deadline(0)) is start


@pytest.mark.slow
def test_the_planner_sums_hierarchically_between_zones_and_flat_in_a_node() -> None:
    apart = planned(problem(zones(2, gpus_per_node=4, seconds=0.01)))
    assert len(apart.plan.gradient_sync.domains) == 2
    together = planned(problem(zones(1, gpus_per_node=4)))
    assert together.plan.gradient_sync == GradientSyncPlan()
