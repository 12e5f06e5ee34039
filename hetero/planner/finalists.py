"""The last round: plans that the search found, checked by the validator and scored by the simulator.

The search prices a step by a formula; among covers that are close together the simulator has the last word. It also
decides whether depths beyond the smallest ones pay where memory holds them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan, Replica
from hetero.plan.validate import least_in_flight, validate
from hetero.planner.clock import Clock
from hetero.planner.cover import Cover, Score
from hetero.planner.expand import expand
from hetero.planner.halves import levelled, longest_stage_s, recomputing_more
from hetero.planner.problem import Problem

EXTRA_DEPTHS = (0, 1, 2)

REPLAY_S, REPLAY_MESSAGES_S = 2e-5, 4e-5
"""Of one stage and one microbatch, as seen on one core, and what is added where there are neighbours."""

STAGE_S = 4e-4
"""Of one stage, for what does not depend on its microbatches."""

FORMULA_ERROR = 1.03
"""The formula's step is mostly within this factor of the simulator's."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A legal plan that fits, with its prediction.

    memory: parts of one device of every stage at the device's peak, by replica and stage.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryBreakdown]

    @property
    def step_s(self) -> float:
        return self.simulation.step_s


def scored(plan: Plan, problem: Problem, clock: Clock | None = None) -> Scored | None:
    """``plan`` with its prediction; ``None`` if a stage takes more memory than its device has, or if to look at it
    would take longer than is left of ``clock``.

    Raises:
        PlanError: the plan is not legal, or not for this cluster.
    """
    if clock is not None and not clock.has(scoring_s(plan)):
        return None
    validate(plan)
    check_plan_on_cluster(plan, problem.cluster)
    memory = plan_memory(plan, problem.costs)
    if short_bytes(plan, problem, memory):
        return None
    return Scored(plan=plan, simulation=simulate(plan, problem.topology, problem.costs), memory=memory)


def scoring_s(plan: Plan) -> float:
    """How long checks and simulator take for ``plan``, about: every microbatch of replicas that are not alike is
    replayed."""
    seconds = STAGE_S * sum(len(replica.stages) for replica in plan.replicas)
    for first, *_ in plan.alike():
        replica = plan.replicas[first]
        each_s = REPLAY_S + REPLAY_MESSAGES_S * (len(replica.stages) > 1)
        seconds += each_s * sum(replica.num_microbatches(s) for s in range(len(replica.stages)))
    return seconds


def capacity_bytes(plan: Plan, problem: Problem, key: tuple[int, int]) -> int:
    """Memory of a device of stage ``key``, replica and stage."""
    rank = plan.replicas[key[0]].stages[key[1]].ranks[0]
    return next(
        kind.memory_bytes for kind in problem.kinds if kind.first_rank <= rank < kind.first_rank + kind.num_devices
    )


def short_bytes(
    plan: Plan, problem: Problem, memory: Mapping[tuple[int, int], MemoryBreakdown]
) -> dict[tuple[int, int], int]:
    """How much the devices lack that do not hold their stages, by replica and the first of these stages."""
    over = {key: parts.total - capacity_bytes(plan, problem, key) for key, parts in device_memory(plan, memory).items()}
    return {key: num_bytes for key, num_bytes in over.items() if num_bytes > 0}


def ranked(
    covers: Iterable[Cover], problem: Problem, clock: Clock, *, finish: Callable[[Scored], Scored]
) -> list[Scored]:
    """Plans of the covers that fit, the best simulated goal first: of each cover its best one, unless another cover's
    is better than its compute alone.

    ``finish`` makes the most of a plan before it is compared, without a change to its compute.
    """
    of_covers: list[Scored] = []
    least = math.inf
    for cover in covers:
        seen: set[Plan] = set()
        best: Scored | None = None
        for extra_depth in EXTRA_DEPTHS:
            if clock.is_over():
                break
            plan = expand(cover, problem, extra_depth=extra_depth)
            if plan in seen:
                continue
            seen.add(plan)
            candidate = fitted(plan, problem, clock)
            if candidate is None or _least_worth(candidate, problem) >= least:
                continue
            candidate = finish(candidate)
            if best is None or worth(candidate, problem) < worth(best, problem):
                best = candidate
                least = min(least, worth(best, problem))
        if best is not None:
            of_covers.append(best)
    return sorted(of_covers, key=lambda each: worth(each, problem))


def _least_worth(candidate: Scored, problem: Problem) -> float:
    """What its goal would be if nothing but the compute took time."""
    return worth(candidate, problem) * candidate.simulation.compute_end_s / candidate.step_s


def best_levelled(
    covers: Iterable[tuple[Cover, Score]], problem: Problem, clock: Clock, *, below_s: float
) -> Scored | None:
    """The best plan of the covers whose stages half layers level; ``None`` if there are none.

    Only those are simulated whose step by the formula, shorter as the longest stage gets, may be below ``below_s``.
    """
    best: Scored | None = None
    for cover, score in covers:
        if clock.is_over():
            break
        plan = expand(cover, problem)
        level = levelled(plan, problem)
        if level is None:
            continue
        shorter = longest_stage_s(level, problem) / longest_stage_s(plan, problem)
        if shorter * score.step_s < FORMULA_ERROR * below_s:
            candidate = fitted(level, problem, clock)
            if candidate is not None and (best is None or worth(candidate, problem) < worth(best, problem)):
                best = candidate
    return best


def fitted(plan: Plan, problem: Problem, clock: Clock | None = None) -> Scored | None:
    """As :func:`scored`; where memory is short, with smaller depths, or with more recomputation if a stage has half
    a layer, since the search chose the recomputation for whole ones. ``None`` if that does not help.

    Raises:
        PlanError: the plan is not legal, or not for this cluster.
    """
    found = scored(plan, problem, clock) or scored_shallower(plan, problem, clock)
    if found is None and any(stage.ends_with_attention for _, _, stage in plan.stages()):
        more = recomputing_more(plan, problem, lambda key: capacity_bytes(plan, problem, key))
        found = scored(more, problem, clock) if more is not None else None
    return found


def scored_shallower(plan: Plan, problem: Problem, clock: Clock | None = None) -> Scored | None:
    """As :func:`scored`, with smaller depths where a stage is short of memory; ``None`` if that does not help."""
    if clock is not None and not clock.has(scoring_s(plan)):
        return None
    memory = plan_memory(plan, problem.costs)
    replicas = list(plan.replicas)
    for (r, s), over in short_bytes(plan, problem, memory).items():
        if replicas[r].is_interleaved:
            return None  # Its depths are chosen with its stages.
        parts = memory[r, s]
        each = (parts.activations + parts.logits) / replicas[r].stages[s].in_flight
        if not each:
            return None  # At its peak the stage holds nothing but what waits for its weights' gradients.
        depth = replicas[r].stages[s].in_flight - max(1, -int(-over // each))
        if depth < least_in_flight(replicas[r], s):
            return None
        replicas[r] = _with_depth(replicas[r], s, depth)
    shallower = dataclasses.replace(plan, replicas=tuple(replicas))
    return scored(shallower, problem, clock) if shallower != plan else None


def _with_depth(replica: Replica, stage: int, depth: int) -> Replica:
    stages = list(replica.stages)
    stages[stage] = dataclasses.replace(stages[stage], in_flight=depth)
    return dataclasses.replace(replica, stages=tuple(stages))


def worth(candidate: Scored, problem: Problem) -> float:
    """What is minimised: seconds of a step, or its price."""
    if problem.goal == "time":
        return candidate.step_s
    return price_per_hour(candidate.plan, problem) * candidate.step_s / 3600


def better(a: Scored | None, b: Scored | None, problem: Problem) -> Scored | None:
    """The one that is worth more, the first if they are alike; ``None`` if there is none."""
    return min((each for each in (a, b) if each is not None), key=lambda each: worth(each, problem), default=None)


def price_per_hour(plan: Plan, problem: Problem) -> float:
    """Of the devices that work; a node of which a part works counts with that part."""
    working = set(plan.ranks()).difference(plan.idle_ranks)
    return sum(
        (kind.price_per_hour or 0.0)
        / kind.gpus_per_node
        * sum(kind.first_rank <= rank < kind.first_rank + kind.num_devices for rank in working)
        for kind in problem.kinds
    )
