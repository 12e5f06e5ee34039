"""The planner's best cover against every plan there is, and the lower bound below both."""

import dataclasses
from unittest import mock

import pytest

from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.problem import Problem
from hetero.planner.reference.exhaustive import exhaustive_best
from hetero.spec.profile import ModuleKind
from tests.unit.planner.clusters import cluster, opt_model, planned, problem
from tests.unit.planner.random_problems import random_problem

SIZES, SAMPLES = (1, 2, 3, 4), (1, 2, 4, 8, 16)

WITHIN = 1.002


def check(question: Problem) -> None:
    """The shortest step by the formula is the planner's; none, nor one by the simulator, is below the lower bound."""
    every = exhaustive_best(question, sizes=SIZES, samples=SAMPLES)
    # What passes make of the plan does not matter here, and would take its time.
    with mock.patch("hetero.planner.improve.passes.PASSES", ()):
        result = planned(question, effort_s=60)
    assert result.finished
    assert result.score.step_s <= every.step_s * WITHIN
    assert every.step_s <= result.score.step_s * 1.0001
    assert result.lower_bound_s <= min(every.step_s, result.simulation.step_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "num_layers", "batch"),
    [
        ((("A100-40", 2, 1), ("V100-16", 2, 1)), 4, 6),
        ((("GH200", 1, 1), ("A100-40", 1, 1), ("V100-16", 1, 1)), 6, 5),
        ((("A100-40", 2, 1), ("V100-16", 2, 1)), 12, 12),
        ((("A100-40", 2, 1), ("V100-16", 2, 1), ("GH200", 1, 1)), 8, 8),
    ],
)
def test_no_plan_is_better_on_published_profiles(
    nodes: tuple[tuple[str, int, int], ...], num_layers: int, batch: int
) -> None:
    check(problem(cluster(*nodes), opt_model(num_layers, 1024, 16), batch))


@pytest.mark.slow
@pytest.mark.rotates("seeds", every=2, turn=0)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_better_on_random_clusters(seed: int) -> None:
    check(random_problem(seed, gpus=(2, 2, 1), num_layers=12, batch=8))


@pytest.mark.slow
@pytest.mark.rotates("seeds", every=6, turn=3)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_plan_is_better_on_eight_gpus_of_three_types(seed: int) -> None:
    check(random_problem(seed, gpus=(2, 4, 2), num_layers=12, batch=16))


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_no_plan_is_better_on_eight_gpus_with_published_profiles() -> None:
    """V100 nodes beside A100 and GH200: the best replica cuts them into two unlike any template."""
    spec = cluster(("A100-40", 2, 1), ("V100-16", 4, 1), ("GH200", 2, 1))
    check(problem(spec, opt_model(12, 1024, 16), 16))


def test_twice_the_devices_halve_the_lower_bound() -> None:
    """But for the least update of a first stage, the lower bound is work over speed."""
    one, two = (problem(cluster(("A100-40", 4, n)), opt_model(6, 1024, 16), 16) for n in (1, 2))
    parts: tuple[ModuleKind, ...] = ("embedding", "attention")
    update_s = sum(one.costs.update(part, device="A100-40", tp=4)[0] for part in parts)
    bounds = [lower_bound_s(question) - update_s for question in (one, two)]
    assert bounds[1] == pytest.approx(bounds[0] / 2, rel=0.01)


def test_devices_that_hold_nothing_do_not_lower_the_bound() -> None:
    spec = cluster(("A100-40", 2, 1), ("V100-16", 2, 1))
    small = dataclasses.replace(spec.node_types[1], memory_gib=1)
    with_small = dataclasses.replace(spec, node_types=(spec.node_types[0], small))
    model = opt_model(6, 1024, 16)
    alone = problem(cluster(("A100-40", 2, 1)), model, 16)
    beside = problem(with_small, model, 16)
    assert lower_bound_s(beside) == pytest.approx(lower_bound_s(alone), rel=1e-6)
