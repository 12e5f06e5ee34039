"""Plans that deal all nodes anew: kept until they are the best ones, and none is lost where time runs out."""

import random
from collections.abc import Callable

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.dealt_plans import DealtPlan, DealtPlans
from hetero.planner.improve.division import Divider
from hetero.planner.improve.recompositions import Recomposer
from hetero.planner.problem import Problem
from tests.unit.planner.clusters import OPT_350M, cluster, problem


def question() -> Problem:
    return problem(cluster(("A100-40", 4, 2), ("V100-16", 4, 2)), OPT_350M, 96)


def dealt() -> DealtPlans:
    asked = question()
    divider = Divider(asked)

    def made(make: Callable[[], Plan | None]) -> Plan | None:
        try:
            return make()
        except (PlanError, ConfigError):
            return None

    return DealtPlans(
        Recomposer(asked, divider),
        random.Random(0),
        made=made,
        estimated=divider.estimates.step_s,
        learns=True,
    )


def taken(plans: DealtPlans) -> list[DealtPlan]:
    """All that are kept."""
    found = []
    while (each := plans.take(float("inf"))) is not None:
        found.append(each)
    return found


def test_the_best_ones_are_taken_first_and_none_above_what_is_asked_for() -> None:
    plans = dealt()
    assert plans.make_more(Deadline(1e9, CountedWork()))
    every = taken(plans)
    assert len(every) > 3
    assert [each.about for each in every] == sorted(each.about for each in every)
    plans.put_back(every[1])
    assert plans.take(every[0].about) is None
    assert plans.take(every[1].about) == every[1]
    assert plans.take(float("inf")) is None


def test_what_there_was_no_time_for_comes_next() -> None:
    """In ten short times as many plans are made as in a long one, and the best is as good."""
    short, at_once = dealt(), dealt()
    at_once.make_more(Deadline(1e9, CountedWork()))
    for _ in range(10):
        short.make_more(Deadline(0.2, CountedWork()))
    by_parts, whole = taken(short), taken(at_once)
    assert len(by_parts) >= len(whole) / 2
    assert by_parts[0].about <= 1.02 * whole[0].about


def test_none_is_lost_where_the_time_ends_with_drawing() -> None:
    """All that were drawn wait for their turn."""
    asked = question()
    drawn, dealing = (Recomposer(asked, Divider(asked)) for _ in range(2))
    drawn.draw(random.Random(0), 320, Deadline(0.05, CountedWork()))
    plans = DealtPlans(dealing, random.Random(0), made=lambda make: None, estimated=lambda plan: 1.0, learns=True)
    assert not plans.make_more(Deadline(0.05, CountedWork()))
    assert len(drawn.drawn) > 30
    assert len(dealing.drawn) == len(drawn.drawn)


def test_in_no_time_nothing_is_made() -> None:
    plans = dealt()
    assert not plans.make_more(Deadline(1e-9, CountedWork()))
    assert taken(plans) == []


def test_where_nothing_is_new_that_is_said() -> None:
    """Two nodes of one device each have few shapes."""
    asked = problem(cluster(("A100-40", 1, 2)), OPT_350M, 8)
    divider = Divider(asked)
    plans = DealtPlans(
        Recomposer(asked, divider),
        random.Random(0),
        made=lambda make: make(),
        estimated=divider.estimates.step_s,
        learns=True,
    )
    made = [plans.make_more(Deadline(1e9, CountedWork())) for _ in range(30)]
    assert made[0]
    assert not any(made[-5:])
