"""Scores plans: checked by the validator and the memory model, timed by the simulator, compared by the problem's goal.

A plan that is short of memory by a little may fit with smaller depths, or with more recomputation; the same is tried
everywhere.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetero.cost.capacity import capacity_bytes
from hetero.cost.host_memory import check_host_memory
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.cost.simulation.step_limit import StepTooLong
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.errors import ConfigError, PlanError, PlanMemoryError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan, Recompute, Replica, StageKey
from hetero.plan.offload import NOTHING_ON_HOST, OnHost
from hetero.plan.validate import least_in_flight, validate
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem

REPLAY_S, REPLAY_MESSAGES_S = 1e-5, 2e-5
"""Seconds of scoring for one stage and one microbatch, and what is added where there are neighbours. Estimates: on one
core :func:`score_plan` took 18 to 26 us for a stage alone, 24 to 41 in a pipeline of four, from 256 microbatches on."""

STAGE_S = 4e-4
"""Seconds of scoring for one stage, whatever its microbatches; an estimate."""

CHECK_S = 3e-5
"""Seconds of what comes before the simulation, for one stage: is the plan legal, does it fit? An estimate."""

SIMULATED_S, SIMULATED_STAGE_S, SIMULATED_REPLAY_SHARE = 1.5e-3, 7.5e-5, 0.2
"""What a simulation has taken in the mean: seconds, those for each stage, and of its replays this share, as most parts
are known from other plans. Estimates: on five clusters 0.8 to 1.1 times what it was (2026-11-26)."""

DRY_RUN_S = 2e-5
"""Seconds in which an interleaved replica is run dry, for one stage and one microbatch; an estimate (16 to 28 us)."""

TOO_LONG_SHARE = 0.5
"""Of that, what one has taken that was left early. An estimate."""

MORE_RECOMPUTE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full", "full": "full"}
"""What to recompute where memory is short."""

LEFT_TO_HOSTS = 5.0
"""Scoring takes so many times as long if something is left to hosts: the replay goes several rounds, and buckets and
blocks have their times. An estimate: 2 to 4 for Llama-7B on two devices, more where they are tensor-parallel."""

FREE_PRICE_PER_HOUR = 1e-6
"""Price per hour that every plan has on top of its own where money is compared: of plans that cost nothing the fastest
is then the best. A thousandth of the least budget, which no real price is near."""

LEAST_GAIN = 2e-4
"""Relative: a change has to better the goal by this much; what is less is not worth another plan. A heuristic."""


@dataclass(frozen=True, kw_only=True)
class ScoredPlan:
    """A legal plan that fits, with its prediction.

    memory: parts of one device of every stage at the device's peak, by replica and stage.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[StageKey, MemoryBreakdown]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.step_s


@dataclass(frozen=True, slots=True)
class EstimatedPlan:
    """A plan that is made only if the estimate of its step is among the best.

    step_s: by a formula, not by the simulator.
    """

    step_s: float
    make: Callable[[], Plan]


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The plans that are left for improvement.

    best: of all plans so far.
    others: other good ones, the best first; ``best`` may be among them.
    estimated: plans of good covers, the best by the formula first.
    """

    best: ScoredPlan
    others: tuple[ScoredPlan, ...] = ()
    estimated: tuple[EstimatedPlan, ...] = ()

    def starts(self, most: int) -> tuple[ScoredPlan, ...]:
        """The first plans to start from, ``best`` ahead of all; at most so many, none of them twice."""
        return tuple({start.plan: start for start in (self.best, *self.others)[:most]}.values())

    def led_by(self, best: ScoredPlan) -> "Shortlist":
        """The same list with another best plan."""
        return dataclasses.replace(self, best=best)


def score_plan(
    plan: Plan, problem: Problem, deadline: Deadline | None = None, *, within_s: float = math.inf
) -> ScoredPlan | None:
    """Check ``plan`` and predict its step.

    within_s: a longer step is of no interest.

    Returns:
        ``None`` if a stage takes more memory than its device or its host has, or if to look at it would take longer
        than is left of ``deadline``.

    Raises:
        PlanError: the plan is not legal, or not for this cluster.
        ConfigError: a price is missing, such as that of a link.
        StepTooLong: the step takes longer than ``within_s``; one that does may be returned, too.
    """
    if deadline is None:
        return _scored(plan, problem, within_s)
    most_s, taken_s = scoring_s(plan), CHECK_S * _num_stages(plan)
    if not deadline.has(dry_runs_s(plan) + most_s):
        return None
    try:
        found = _scored(plan, problem, within_s)
        if found is not None:
            taken_s = usual_s(plan)
        return found
    except StepTooLong:
        taken_s = TOO_LONG_SHARE * usual_s(plan)
        raise
    finally:
        deadline.give_back(most_s - taken_s)


def _scored(plan: Plan, problem: Problem, within_s: float) -> ScoredPlan | None:
    validate(plan)
    check_plan_on_cluster(plan, problem.cluster)
    memory = plan_memory(plan, problem.costs)
    if bytes_over_capacity(plan, problem, memory):
        return None
    if not _hosts_have_room(plan, problem):
        return None
    simulation = simulate(plan, problem.topology, problem.costs, problem.known_parts, within_s=within_s)
    return ScoredPlan(plan=plan, simulation=simulation, memory=memory)


def scoring_s(plan: Plan) -> float:
    """Estimate the seconds that checks and simulator take for ``plan`` at most: every microbatch of replicas that are
    not alike is replayed."""
    return (STAGE_S * _num_stages(plan) + _replays_s(plan)) * _times_for_hosts(plan)


def usual_s(plan: Plan) -> float:
    """Estimate the seconds that they have taken in the mean. What is known from other plans must not change it, or the
    same work would be counted otherwise a second time."""
    alone_s = SIMULATED_S + SIMULATED_STAGE_S * _num_stages(plan) + SIMULATED_REPLAY_SHARE * _replays_s(plan)
    return min(alone_s * _times_for_hosts(plan), scoring_s(plan))


def dry_runs_s(plan: Plan) -> float:
    """Estimate the seconds of finding out whether a replica stands still, as only interleaved ones may."""
    interleaved = (plan.replicas[first] for first, *_ in plan.alike() if plan.replicas[first].is_interleaved)
    return DRY_RUN_S * sum(sum(replica.microbatch_counts) for replica in interleaved)


def _replays_s(plan: Plan) -> float:
    seconds = 0.0
    for first, *_ in plan.alike():
        replica = plan.replicas[first]
        each_s = REPLAY_S + REPLAY_MESSAGES_S * (len(replica.stages) > 1)
        seconds += each_s * sum(replica.microbatch_counts)
    return seconds


def _times_for_hosts(plan: Plan) -> float:
    return LEFT_TO_HOSTS if any(stage.offload != NOTHING_ON_HOST for _, _, stage in plan.stages()) else 1.0


def _num_stages(plan: Plan) -> int:
    return sum(len(replica.stages) for replica in plan.replicas)


def score_fitted(plan: Plan, problem: Problem, deadline: Deadline | None = None) -> ScoredPlan | None:
    """Score ``plan``; where memory is short, with smaller depths, or with more recomputation if a stage has half a
    layer, since the search chose the recomputation for whole ones.

    Returns:
        ``None`` if that does not help, or if ``deadline`` leaves too little time.

    Raises:
        PlanError: the plan is not legal, or not for this cluster.
        ConfigError: a price is missing.
    """
    found = score_plan(plan, problem, deadline) or score_with_smaller_depths(plan, problem, deadline)
    if found is None and any(stage.ends_with_attention for _, _, stage in plan.stages()):
        more = with_more_recompute(plan, problem)
        found = score_plan(more, problem, deadline) if more is not None else None
    return found


def score_if_legal(plan: Plan, problem: Problem, deadline: Deadline | None = None) -> ScoredPlan | None:
    """As :func:`score_fitted`; ``None`` also for a plan that cannot be made: what it was made from knows nothing of the
    communicators that a rank may be in, for instance, or it alone needs a link that is missing."""
    try:
        return score_fitted(plan, problem, deadline)
    except (PlanError, ConfigError):
        return None


def is_legal(plan: Plan) -> bool:
    """Whether a runtime could execute ``plan``, memory aside."""
    try:
        validate(plan)
    except PlanError:
        return False
    return True


def score_with_smaller_depths(
    plan: Plan, problem: Problem, deadline: Deadline | None = None, *, within_s: float = math.inf
) -> ScoredPlan | None:
    """Score ``plan`` with smaller depths where a stage is short of memory; ``None`` if that does not help. ``within_s``
    and errors as for :func:`score_plan`, which may have had no time to see whether the plan is legal."""
    # What is simulated counts when it is.
    if deadline is not None and not deadline.has(CHECK_S * _num_stages(plan)):
        return None
    validate(plan)
    memory = plan_memory(plan, problem.costs)
    changed: dict[int, Replica] = {}
    for (r, s), over in bytes_over_capacity(plan, problem, memory).items():
        replica = changed.get(r, plan.replicas[r])
        if replica.is_interleaved:
            return None  # Its depths are chosen with its stages.
        parts = memory[r, s]
        each = (parts.activations + parts.logits) / replica.stages[s].in_flight
        if not each:
            return None  # At its peak the stage holds nothing but what waits for its weights' gradients.
        depth = replica.stages[s].in_flight - max(1, -int(-over // each))
        if depth < least_in_flight(replica, s):
            return None
        changed[r] = replica.with_stage(s, in_flight=depth)
    return score_plan(plan.with_replicas(changed), problem, deadline, within_s=within_s) if changed else None


def with_more_recompute(plan: Plan, problem: Problem) -> Plan | None:
    """Recompute more where memory is short, until ``plan`` fits; ``None`` if all of it is too little.

    Raises:
        PlanError: the plan is not legal.
    """
    validate(plan)
    for _ in MORE_RECOMPUTE:
        over = bytes_over_capacity(plan, problem, plan_memory(plan, problem.costs))
        if not over:
            return plan
        changed: dict[int, Replica] = {}
        for r, first in over:
            replica = changed.get(r, plan.replicas[r])
            for s in replica.group_of(first):
                # What is computed again in full has no backward that could be split.
                recompute = MORE_RECOMPUTE[replica.stages[s].recompute]
                replica = replica.with_stage(s, recompute=recompute, wgrad_delay=None)
            changed[r] = replica
        plan = plan.with_replicas(changed)
    return None


def bytes_over_capacity(
    plan: Plan, problem: Problem, memory: Mapping[StageKey, MemoryBreakdown]
) -> dict[StageKey, int]:
    """Bytes that the devices lack which do not hold their stages, by replica and the first of these stages."""
    over = {}
    for (r, s), parts in device_memory(plan, memory).items():
        capacity = capacity_bytes(plan.replicas[r].stages[s], problem.cluster)
        assert capacity is not None, "a problem knows the memory of all of its devices"
        if parts.total > capacity:
            over[r, s] = parts.total - capacity
    return over


def _hosts_have_room(plan: Plan, problem: Problem) -> bool:
    try:
        check_host_memory(plan, problem.cluster)
    except PlanMemoryError:
        return False
    return True


def memory_is_short(best: ScoredPlan | None) -> bool:
    """Whether leaving state to hosts may be worth it: nothing fits, or the best plan so far computes again for the
    memory that it saves. A heuristic: a plan that cuts layers more finely to fit, or idles small devices, is not
    seen."""
    return best is None or any(
        stage.recompute != "none" or stage.offload != NOTHING_ON_HOST for _, _, stage in best.plan.stages()
    )


def left_to_hosts(best: ScoredPlan | None, problem: Problem) -> OnHost:
    """The most that stages of the search leave to hosts: nothing where memory is not short; gradients and weights only
    where nothing fits without, since they are copied in every microbatch. A heuristic: in a plan that fits, how much of
    them leaves is settled stage by stage, for the layers that its stages have."""
    if not (problem.offloads and memory_is_short(best)):
        return OnHost.NOTHING
    streams = best is None or any(stage.offload.gradients_from is not None for _, _, stage in best.plan.stages())
    return problem.most_on_host if streams else OnHost.OPTIMIZER


def goal_value(candidate: ScoredPlan, problem: Problem) -> float:
    """Return what is minimised, above 0: seconds of a step, or its price."""
    return goal_per_second(candidate.plan, problem) * candidate.step_s


def goal_per_second(plan: Plan, problem: Problem) -> float:
    """Return what each second of a step of ``plan`` adds to the goal, above 0: a second, or the price of one."""
    if problem.goal == "time":
        return 1.0
    return (price_per_hour(plan, problem) + FREE_PRICE_PER_HOUR) / 3600


def is_better(found: ScoredPlan, best: ScoredPlan, problem: Problem) -> bool:
    """Whether the goal of ``found`` is enough below that of ``best`` to take it instead."""
    return goal_value(found, problem) < (1 - LEAST_GAIN) * goal_value(best, problem)


def better_of(a: ScoredPlan | None, b: ScoredPlan | None, problem: Problem) -> ScoredPlan | None:
    """The one with the smaller goal, the first if they are alike; ``None`` if there is none."""
    return min((each for each in (a, b) if each is not None), key=lambda each: goal_value(each, problem), default=None)


def is_within_budget(plan: Plan, problem: Problem) -> bool:
    """Return whether the devices that work cost no more than the budget allows; true where there is none."""
    return problem.budget_per_hour is None or price_per_hour(plan, problem) <= problem.budget_per_hour


def price_per_hour(plan: Plan, problem: Problem) -> float:
    """Price per hour of the devices that work; a node of which a part works counts with that part."""
    working = set(plan.ranks()).difference(plan.idle_ranks)
    return sum(
        (node_type.price_per_hour or 0.0) / node_type.gpus_per_node * sum(rank in node_type.ranks for rank in working)
        for node_type in problem.node_types
    )
