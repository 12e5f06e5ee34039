"""Climbs that share the time: which one goes on, and that a climb by slices is the climb at once."""

import dataclasses
import random
from functools import cache

from hetero.plan.ir import Plan
from hetero.planner.improve.climbs import SLICE, ChangeOrder, Climb, Climbs, structure_of
from hetero.planner.improve.plan_changes import PlanChange, families
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, goal_value, score_if_legal
from tests.unit.planner import unlike_devices
from tests.unit.planner.test_whole_plans import start_of


def order_of(question: Problem, seed: int = 0) -> ChangeOrder:
    return ChangeOrder(question, families(), random.Random(seed))


@cache
def scored(plan: Plan) -> ScoredPlan | None:
    return score_if_legal(plan, unlike_devices.mixed_problem())


def judged(change: PlanChange, current: ScoredPlan, most: float) -> ScoredPlan | None:
    try:
        return scored(change())
    except ZeroDivisionError:
        return None


def never() -> bool:
    return False


def climbed(most: int, *, times: int) -> Climb:
    question, start = start_of("unlike devices")
    climb = Climb(start, order_of(question), question)
    for _ in range(times):
        climb.go_on(judged, never, most)
    return climb


def test_a_climb_by_slices_is_the_climb_at_once() -> None:
    at_once, by_slices = climbed(60, times=1), climbed(10, times=6)
    assert by_slices.current.plan == at_once.current.plan
    assert (by_slices.in_vain, by_slices.is_over) == (at_once.in_vain, at_once.is_over)
    assert at_once.goal < goal_value(start_of("unlike devices")[1], unlike_devices.mixed_problem())


def test_a_climb_ends_where_no_change_helps() -> None:
    question, _ = start_of("unlike devices")
    climb = climbed(2000, times=1)
    assert climb.is_over
    changes = [change for family in families() for change in family(climb.current.plan, question)]
    assert climb.in_vain >= len(changes)
    found = [each for each in (judged(change, climb.current, climb.goal) for change in changes) if each is not None]
    assert found
    assert min(goal_value(each, question) for each in found) > (1 - 1e-3) * climb.goal


def test_structures_differ_by_degrees_and_microbatches_alone() -> None:
    _, start = start_of("unlike devices")
    plan, replica = start.plan, start.plan.replicas[0]
    assert len(replica.stages) > 1
    moved = plan.with_replica(0, replica.with_layers_moved(1, 0, 1))
    deeper = plan.with_replica(0, replica.with_stage(0, in_flight=replica.stages[0].in_flight + 1))
    assert structure_of(moved) == structure_of(deeper) == structure_of(plan)
    other = plan.with_replica(0, replica.with_stage(0, micro_batch_size=2 * replica.stages[0].micro_batch_size))
    assert structure_of(other) != structure_of(plan)


def two_starts() -> tuple[Problem, ScoredPlan, ScoredPlan]:
    """The first is better, and their structures differ."""
    question, start = start_of("unlike devices")
    other = next(
        found
        for family in families()
        for change in family(start.plan, question)
        if (found := judged(change, start, 0.0)) is not None and structure_of(found.plan) != structure_of(start.plan)
    )
    first, second = sorted((start, other), key=lambda each: goal_value(each, question))
    return question, first, second


def test_the_better_climb_goes_on_until_it_gains_nothing() -> None:
    question, first, second = two_starts()
    climbs = Climbs(order_of(question), question)
    for each in (second, first):
        climbs.add(climbs.begun(each))
    taken = climbs.take()
    assert taken is not None
    assert taken.current is first
    taken.in_vain = 10**6
    climbs.add(taken)
    taken = climbs.take()
    assert taken is not None
    assert taken.current is second
    taken.is_over = True
    climbs.add(taken)
    left = climbs.take()
    assert left is not None
    assert left.current is first


def test_of_one_structure_the_better_climb_is_kept() -> None:
    question, start = start_of("unlike devices")
    climb = climbed(60, times=1)
    assert climb.current.plan != start.plan
    better = dataclasses.replace(start, plan=climb.current.plan, simulation=climb.current.simulation)
    climbs = Climbs(order_of(question), question)
    if structure_of(start.plan) != structure_of(better.plan):
        better = next(
            found
            for family in families()
            for change in family(start.plan, question)
            if (found := judged(change, start, 0.0)) is not None
            and structure_of(found.plan) == structure_of(start.plan)
            and goal_value(found, question) < goal_value(start, question)
        )
    for each in (start, better, start):
        climbs.add(climbs.begun(each))
    assert climbs.of(better.plan) is not None
    assert climbs.of(start.plan) is None
    assert climbs.knows(start.plan)


def test_leaps_begin_once_from_each_structure_and_from_what_was_climbed() -> None:
    question, first, second = two_starts()
    climbs = Climbs(order_of(question), question)
    fresh = climbs.begun(second)
    climbs.add(fresh)
    assert climbs.next_base(first, far=100.0) is first
    assert climbs.next_base(first, far=100.0) is None, "nobody has climbed from the other one yet"
    fresh.in_vain = SLICE
    assert climbs.next_base(first, far=1e-3) is None
    assert climbs.next_base(first, far=100.0) is second
    assert climbs.next_base(first, far=100.0) is None
