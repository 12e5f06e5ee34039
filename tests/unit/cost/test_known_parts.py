"""Simulations that take parts from those before: the same to the last bit as those that make all, never below the
bound, and left early only where the step is too long."""

import dataclasses
import random
from collections.abc import Callable
from functools import cache

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
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.planner.improve.replica_changes import deep_enough
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import Link
from tests.bench.random_plan_moves import random_neighbour
from tests.helpers.cases import slow
from tests.helpers.plans import replica, stage
from tests.unit.planner import short_memory, slow_zones, unlike_devices
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


@cache
def on_hosts() -> tuple[Problem, Plan]:
    """Two alike pipelines of data-parallel stages on two nodes of four cards, whose hosts could update."""
    (node,) = short_memory.problem().cluster.node_types
    node = dataclasses.replace(node, gpus_per_node=4, count=2, memory_gib=80)
    slow = Link(bandwidth_gb_per_s=2.0, latency_us=50.0)
    question = short_memory.problem(cluster=ClusterSpec(node_types=(node,), links=Links(between_nodes=slow)))
    alike = [
        replica(
            stage(layers=(0, 10), ranks=(r,), device="A100-40", mbs=2),
            stage(layers=(10, 21), ranks=(r + 1, r + 2), device="A100-40", dp=2),
            stage(layers=(21, 32), ranks=(r + 3,), device="A100-40", mbs=2),
            num_samples=8,
        )
        for r in (0, 4)
    ]
    return question, question.plan_of(alike)


Change = Callable[[Plan], Plan]


def in_each(number: int, **changes: object) -> Change:
    """Another value of fields of a stage, in each replica."""

    def changed(start: Plan) -> Plan:
        return start.with_replicas(
            {r: each.with_stage(number, **changes) for r, each in enumerate(start.replicas)}  # type: ignore[arg-type]
        )

    return changed


def summed(**changes: object) -> Change:
    return lambda start: dataclasses.replace(
        start,
        gradient_sync=dataclasses.replace(start.gradient_sync, **changes),  # type: ignore[arg-type]
    )


CHANGES: dict[str, Change] = {
    "domains": summed(domains=((0, 1, 2, 3), (4, 5, 6, 7))),
    "size of buckets": summed(bucket_numel=10_000_000),
    "state on the host": in_each(2, offload=Offload(optimizer_from=27)),
    "other layers": lambda start: start.with_replica(0, start.replicas[0].with_layers_moved(0, 1, 1)),
    "recomputation": in_each(0, recompute="full"),
    "a delay": in_each(2, wgrad_delay=0),
    # Then the ranks behind take turns, and so do those that these send to.
    "lanes of the stages behind": lambda start: start.with_replicas(
        {r: deep_enough(each.with_stage(0, micro_batch_size=1)) for r, each in enumerate(start.replicas)}
    ),
    "tensor parallelism": in_each(1, tp=2, dp=1, micro_batch_size=2),
    "samples": lambda start: start.with_replicas(
        {
            0: dataclasses.replace(start.replicas[0], num_samples=6),
            1: dataclasses.replace(start.replicas[1], num_samples=10),
        }
    ),
}
"""What may be other in a plan than in one that has the rest in common with it."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_made_again(name: str) -> None:
    """Of a plan that differs from the one before in a single thing."""
    question, start = on_hosts()
    known, other = KnownParts(8), CHANGES[name](start)
    for plan in (start, other):
        validate(plan)
        found = simulate(plan, question.topology, question.costs, known)
        assert everything(found) == everything(simulate(plan, question.topology, question.costs))
    assert everything(found) != everything(simulate(start, question.topology, question.costs)), "the change tells"


def test_what_was_not_asked_for_longest_makes_room() -> None:
    recent = Recent[str](2)
    made: list[int] = []
    for key in (1, 2, 1, 3, 1, 2):
        value = recent.of(key, lambda: f"made {len(made)}")
        if value == f"made {len(made)}":
            made.append(key)
    assert made == [1, 2, 3, 2]
