"""Simulations that take parts from those before: the same to the last bit as those that make all, never below the
bound, and left early only where the step is too long."""

import random

import pytest

from hetero.cost.memory import plan_memory
from hetero.cost.simulation.recent import Recent
from hetero.cost.simulation.simulated_plan import KnownParts
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.cost.simulation.step_bound import least_step_s
from hetero.cost.simulation.step_limit import StepTooLong
from hetero.errors import ConfigError, PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner.problem import Problem
from tests.bench.random_plan_moves import random_neighbour
from tests.helpers.cases import slow
from tests.unit.planner import slow_zones, unlike_devices
from tests.unit.planner.clusters import OPT_350M, cluster, planned, problem


def legal(plan: Plan, question: Problem) -> bool:
    try:
        validate(plan)
        check_plan_on_cluster(plan, question.cluster)
        plan_memory(plan, question.costs)
    except (PlanError, ConfigError):
        return False
    return True


def starts() -> dict[str, tuple[Problem, Plan]]:
    """A pipeline with its devices in unlike stages, data parallelism over slow links, and what the planner makes."""
    uneven = unlike_devices.mixed_problem()
    zones = slow_zones.problem(slow_zones.zones(2, gpus_per_node=4))
    mixed = problem(cluster(("A100-40", 4, 1), ("V100-16", 4, 2)), OPT_350M, 32)
    return {
        "unlike devices": (uneven, unlike_devices.halves(uneven)),
        "two zones": (zones, slow_zones.data_parallel(8)),
        "planned": (mixed, planned(mixed, effort_s=0.5).plan),
    }


def is_left(plan: Plan, question: Problem, within_s: float) -> bool:
    """Whether its simulation ends early, if only steps of so many seconds are of interest."""
    try:
        simulate(plan, question.topology, question.costs, within_s=within_s)
    except StepTooLong:
        return True
    return False


def everything(simulation: Simulation) -> tuple[object, ...]:
    """All that it says, in one tuple."""
    return (
        simulation.step_s,
        simulation.compute_end_s,
        dict(simulation.stages),
        list(simulation.spans),
        simulation.alike,
        simulation.syncs,
        dict(simulation.transfers),
        simulation.gathers,
    )


@pytest.mark.slow
@pytest.mark.rotates("seeds")
@pytest.mark.parametrize("name", ["two zones", *slow("unlike devices", "planned")])
def test_known_parts_change_no_bit_of_random_plans(name: str) -> None:
    question, plan = starts()[name]
    known, dice, compared = KnownParts(8), random.Random(0), 0
    while compared < 70:
        other = random_neighbour(plan, question, dice)
        if other is None or not legal(other, question):
            continue
        found = simulate(other, question.topology, question.costs, known)
        assert everything(found) == everything(simulate(other, question.topology, question.costs))
        assert least_step_s(other, question.costs) <= found.step_s * (1 + 1e-12)
        within_s = dice.uniform(0.8, 1.1) * found.step_s
        if not is_left(other, question, within_s):
            assert is_left(other, question, 0.99 * found.compute_end_s)
        else:
            assert within_s < found.step_s
        compared += 1
        if dice.random() < 0.5:
            plan = other


def test_what_was_not_asked_for_longest_makes_room() -> None:
    recent = Recent[str](2)
    made: list[int] = []
    for key in (1, 2, 1, 3, 1, 2):
        value = recent.of(key, lambda: f"made {len(made)}")
        if value == f"made {len(made)}":
            made.append(key)
    assert made == [1, 2, 3, 2]
