"""What others would plan is known before the search: its plan is no worse, however little time there was."""

import dataclasses
import random
from collections.abc import Sequence

import pytest

from hetero.errors import PlanError
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Goal, Problem
from hetero.planner.reference.yardsticks import Yardstick, best_uniform, yardsticks
from hetero.planner.scoring import goal_value, is_within_budget, price_per_hour
from tests.unit.planner.random_problems import random_problem

SHORT_S = 0.01
"""Counted work in which the search alone is now and then worse than a uniform plan."""


def drawn(seed: int, goal: Goal = "time") -> Problem:
    """Draw a small problem; with prices, some of them 0, where they matter."""
    chance = random.Random(seed)
    gpus = tuple(chance.choice((1, 2, 4)) for _ in range(chance.choice((1, 2, 3))))
    question = random_problem(
        seed, gpus=gpus, num_layers=chance.choice((2, 4, 6, 12)), batch=chance.choice((4, 8, 16, 24))
    )
    if goal == "time":
        return question
    priced = tuple(
        dataclasses.replace(each, price_per_hour=chance.choice((0.0, 0.5, 2.0, 30.0)))
        for each in question.cluster.node_types
    )
    budget = chance.choice((None, 1.0, 40.0))
    cluster = dataclasses.replace(question.cluster, node_types=priced)
    return dataclasses.replace(question, cluster=cluster, goal=goal, budget_per_hour=budget)


def planned(question: Problem, limit_s: float, others: Sequence[Yardstick], processes: int = 1) -> PlanResult | None:
    deadline = Deadline(limit_s, CountedWork())
    try:
        return plan_cluster(question, yardsticks=others, deadline=deadline, processes=processes)
    except PlanError:
        return None


def is_worse(result: PlanResult, other: Yardstick, question: Problem) -> bool:
    return other.best is not None and goal_value(result.scored, question) > goal_value(other.best, question)


@pytest.mark.slow
def test_a_short_search_alone_may_be_worse() -> None:
    """Else the test below could not fail."""
    found = []
    for seed in range(40):
        question = drawn(seed)
        result = planned(question, SHORT_S, ())
        found.append(result is not None and is_worse(result, best_uniform(question), question))
    assert any(found)


@pytest.mark.slow
@pytest.mark.rotates("goals", every=2, turn=0)
@pytest.mark.parametrize("limit_s", [1e-9, SHORT_S, 0.1])
@pytest.mark.parametrize("goal", ["time", "money"])
def test_no_plan_is_worse_than_the_uniform_one(limit_s: float, goal: Goal) -> None:
    compared = 0
    for seed in range(40):
        question = drawn(seed, goal)
        uniform = best_uniform(question)
        result = planned(question, limit_s, [uniform])
        if uniform.best is None:
            continue
        assert result is not None, seed
        assert not is_worse(result, uniform, question), seed
        assert is_within_budget(result.plan, question), seed
        assert all(each.ratio >= 1 for each in result.runners_up if each.name == "a uniform plan"), seed
        compared += 1
    assert compared > 20


def test_several_processes_do_not_lose_it() -> None:
    question = drawn(5)
    uniform = best_uniform(question)
    alone, result = planned(question, SHORT_S, ()), planned(question, SHORT_S, [uniform], processes=2)
    assert alone is not None
    assert result is not None
    assert is_worse(alone, uniform, question)
    assert not is_worse(result, uniform, question)


@pytest.mark.slow
def test_no_plan_is_worse_than_any_yardstick() -> None:
    for seed in range(0, 40, 4):
        question = drawn(seed)
        others = yardsticks(question, limit_s=5.0)
        result = planned(question, SHORT_S, others)
        assert result is not None
        assert not any(is_worse(result, other, question) for other in others)


def test_a_plan_beyond_the_budget_is_no_candidate() -> None:
    question = drawn(3, "money")
    dear = best_uniform(dataclasses.replace(question, budget_per_hour=None))
    assert dear.best is not None
    price = price_per_hour(dear.best.plan, question)
    assert price > 0
    limited = dataclasses.replace(question, budget_per_hour=price / 2)
    result = planned(limited, 0.3, [dear])
    assert result is None or is_within_budget(result.plan, limited)
    said = best_uniform(limited).why_none if best_uniform(limited).best is None else None
    assert said is None or said.endswith(f"within a budget of {price / 2:g} per hour")
