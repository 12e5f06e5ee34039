"""Small changes to a finished plan: legal ones, the better ones kept, nothing lost."""

import dataclasses

import pytest

from hetero.plan.ir import Replica
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.local_search import neighbours, search_locally
from tests.unit.planner.line import score_of
from tests.unit.planner.unlike_devices import FAST, halves, mixed_problem


def test_layers_go_to_the_faster_device() -> None:
    problem = mixed_problem()
    start = score_of(halves(problem), problem)
    better = search_locally(start, problem, Deadline(30, CountedWork()))
    fast, slow = better.plan.replicas[0].stages
    assert fast.num_layers + slow.num_layers == 8
    assert fast.num_layers > slow.num_layers
    assert better.step_s < 0.6 * start.step_s


def test_without_time_the_plan_stays() -> None:
    problem = mixed_problem()
    start = score_of(halves(problem), problem)
    assert search_locally(start, problem, Deadline(0)) is start


def test_samples_move_between_unlike_replicas_and_stay_whole() -> None:
    problem = mixed_problem()
    whole = halves(problem).replicas[0].stages[0]
    replicas = tuple(
        Replica(
            num_samples=4,
            stages=(dataclasses.replace(whole.with_layers(0, 8), ranks=(rank,), device=device, in_flight=1),),
        )
        for rank, device in enumerate(FAST)
    )
    plan = dataclasses.replace(halves(problem), replicas=replicas)
    shares = {tuple(r.num_samples for r in each.replicas) for each in neighbours(plan)}
    assert {(3, 5), (5, 3)} <= shares
    assert all(sum(each) == 8 for each in shares)
    better = search_locally(score_of(plan, problem), problem, Deadline(30, CountedWork()))
    assert better.plan.replicas[0].num_samples == pytest.approx(6.5, abs=0.6), "in proportion to four to one"


def test_replicas_of_one_shape_change_together() -> None:
    problem = mixed_problem()
    first = halves(problem).replicas[0]
    half = dataclasses.replace(first, num_samples=4)
    moved = half.with_each_stage(ranks=[(2,), (3,)])
    twice = dataclasses.replace(halves(problem), replicas=(half, moved))
    for plan in neighbours(twice):
        one, other = plan.replicas
        assert one.stages == other.on_ranks_of(one).stages
        assert sorted(plan.ranks()) == [0, 1, 2, 3]
