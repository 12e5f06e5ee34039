"""More memory, more devices and more effort never make a plan slower, on small problems and by counted work.

Of more effort that is exact: it goes on where less of it ends."""

import dataclasses
from typing import Any

import pytest

from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.plan.ir import Plan
from hetero.planner.problem import Problem
from hetero.spec.cluster import Links, ZonePair
from hetero.spec.link import Link
from tests.unit.planner.clusters import cluster, opt_model, planned, problem
from tests.unit.planner.random_problems import random_problem

ALIKE = 1 + 5e-4
"""Steps within so much are alike: what is better by less is not looked for."""


def with_memory(question: Problem, gib: int) -> Problem:
    types = tuple(dataclasses.replace(each, memory_gib=gib) for each in question.cluster.node_types)
    return dataclasses.replace(question, cluster=dataclasses.replace(question.cluster, node_types=types))


@pytest.mark.slow
@pytest.mark.rotates("memories", every=2, turn=0)
@pytest.mark.parametrize("seed", [0, 2])
def test_more_memory_never_makes_the_plan_slower(seed: int) -> None:
    """Where the search has the time to find what there is; in less, which of three plans it finds first is luck."""
    question = random_problem(seed, gpus=(2, 1), num_layers=4, batch=4)
    steps = [planned(with_memory(question, gib), effort_s=4.0).simulation.step_s for gib in (4, 6, 12)]
    assert steps[1] <= steps[0] * ALIKE
    assert steps[2] <= steps[1] * ALIKE


@pytest.mark.slow
@pytest.mark.rotates("more effort", every=2, turn=1)
@pytest.mark.parametrize(
    ("seed", "options"), [(1, {}), (4, {}), (6, {"distributed_optimizer": True})], ids=["1", "4", "shared state"]
)
def test_more_effort_never_makes_the_plan_slower(seed: int, options: dict[str, bool]) -> None:
    """By no bit, wherever the limit cuts: in an initial plan, a search, a pass or a leap."""
    question = dataclasses.replace(random_problem(seed, gpus=(2, 2), num_layers=6, batch=8), **options)
    assert not question.cluster.leaves_rings_open
    efforts_s = [0.03, 0.1, 0.15, 0.3, 0.5, 1.1]
    steps_s = [planned(question, effort_s=effort_s).simulation.step_s for effort_s in efforts_s]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] < steps_s[0]


@pytest.mark.slow
def test_more_effort_goes_on_with_the_same_course(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans that are simulated in a short time are the first ones of those in a longer time."""
    question = random_problem(3, gpus=(2, 1), num_layers=6, batch=8)
    simulated: list[Plan] = []

    def noted(plan: Plan, *args: Any, **options: Any) -> Simulation:
        simulated.append(plan)
        return simulate(plan, *args, **options)

    monkeypatch.setattr("hetero.planner.scoring.simulate", noted)

    def course(effort_s: float) -> list[Plan]:
        simulated.clear()
        planned(question, effort_s=effort_s)
        return list(simulated)

    short, long = course(0.25), course(0.5)
    assert 0 < len(short) < len(long)
    assert long[: len(short)] == short


@pytest.mark.slow
def test_nodes_that_idle_do_not_make_the_plan_slower_than_without_them() -> None:
    """Slow devices behind a slow link: the rest is planned as if they were not there."""
    alone = cluster(("A100-40", 2, 2), ("GH200", 2, 1))
    beside = cluster(("A100-40", 2, 2), ("GH200", 2, 1), ("V100-16", 1, 1))
    link = Link(bandwidth_gb_per_s=0.01, latency_us=1000.0)
    far = tuple(
        dataclasses.replace(each, zone="far") if each.device == "V100-16" else each for each in beside.node_types
    )
    pairs = tuple(pair for pair in beside.links.node_pairs if "V100-16" not in pair.node_types)
    links = Links(node_pairs=pairs, zone_pairs=(ZonePair(zones=("us-central1", "far"), link=link),))
    beside = dataclasses.replace(beside, node_types=far, links=links)
    model = opt_model(6, 1024, 16)
    found, without = (planned(problem(spec, model, 24), effort_s=0.7) for spec in (beside, alone))
    assert {stage.device for _, _, stage in found.plan.stages()} <= {"A100-40", "GH200"}
    assert found.simulation.step_s <= without.simulation.step_s * ALIKE
