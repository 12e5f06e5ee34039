"""Splits backwards of finished plans (zero bubble, arXiv 2401.10241) where the simulator says that it pays.

The search prices whole backwards. A split one shortens the way of a gradient to the first stage, on which all stages
wait at both ends of a step and, where in-flight depths are short of memory, in between; it costs memory for what waits
for its weights' gradients. So a few lags are tried on the best plans, as far as their memory allows, and from the best
of them a few small changes more.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.deadline import Deadline
from hetero.planner.improve.local_search import ENOUGH, changed, neighbours, search_locally
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, bytes_over_capacity, goal_value, score_plan

MOST_STARTS = 4
"""Plans that are split, the best first."""

MOST_CHANGES = 20
"""Plans that are looked at from the best split one on."""

Lag = Callable[[Replica, int], int]


def _by_position(replica: Replica, stage: int) -> int:
    """ZB-H1: the later a stage, the more W's it has time for after its last I."""
    return stage


def _by_depth(replica: Replica, stage: int) -> int:
    """What a stage has less in flight than the first one, in its own microbatches: all hold equally many."""
    first, here = replica.stages[0], replica.stages[stage]
    samples = first.in_flight * first.samples_per_microbatch - here.in_flight * here.samples_per_microbatch
    return max(0, samples // here.samples_per_microbatch)


def _at_once(replica: Replica, stage: int) -> int:
    return 0


LAGS: tuple[Lag, ...] = (_by_position, _by_depth, _at_once)


def with_split_backwards(finalists: Sequence[ScoredPlan], problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The first of ``finalists``, or what split backwards make of one of them before ``deadline`` is over, if
    better."""
    best = finalists[0]
    if not problem.splits_backward or problem.costs.traits.blocking_transfers:
        return best
    enough = ENOUGH * goal_value(best, problem)
    tried: set[Plan] = set()
    for start, lag in itertools.product(finalists[:MOST_STARTS], LAGS):
        plan = _split(start.plan, lag)
        if plan in tried or plan == start.plan:
            continue
        if deadline.is_over():
            break
        tried.add(plan)
        found = _scored(plan, problem, deadline)
        if found is not None and goal_value(found, problem) < min(enough, goal_value(best, problem)):
            best = found
    if best is finalists[0]:
        return best
    return search_locally(best, problem, deadline, neighbours=_lags_and_neighbours, most=MOST_CHANGES)


def _split(plan: Plan, lag: Lag) -> Plan:
    """``plan`` with the lags of this rule in every pipeline, on all stages that can split their backward."""
    replicas = []
    for replica in plan.replicas:
        stages = list(replica.stages)
        if len(stages) > 1:
            for s, stage in enumerate(stages):
                if stage.recompute != "full":
                    last = replica.num_microbatches(s) - 1
                    stages[s] = dataclasses.replace(stage, weight_lag=min(lag(replica, s), last))
        replicas.append(dataclasses.replace(replica, stages=tuple(stages)))
    return dataclasses.replace(plan, replicas=tuple(replicas))


def _scored(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """As :func:`score_plan`, with smaller lags or none where a stage is short of memory; ``None`` if that does not
    help."""
    try:
        if (found := score_plan(plan, problem, deadline)) is not None:
            return found
    except ConfigError:
        return None  # The profiles of a device have no backward of a block that could be divided.
    replicas = list(plan.replicas)
    memory = plan_memory(plan, problem.costs)
    for (r, s), over in bytes_over_capacity(plan, problem, memory).items():
        lag = replicas[r].stages[s].weight_lag
        if lag is None or replicas[r].is_interleaved:
            return None
        replicas[r] = _with_lag(replicas[r], s, smaller_lag(lag, deferred=memory[r, s].deferred, over=over))
    return score_plan(dataclasses.replace(plan, replicas=tuple(replicas)), problem, deadline)


def smaller_lag(lag: int, *, deferred: int, over: int) -> int | None:
    """The lag that makes about ``over`` bytes less of ``deferred``, which up to ``lag`` + 1 microbatches hold; ``None``
    if smaller ones do not help."""
    if lag == 0 or deferred == 0:
        return None
    return max(0, lag - math.ceil(over * (lag + 1) / deferred))


def _with_lag(replica: Replica, stage: int, lag: int | None) -> Replica:
    stages = list(replica.stages)
    stages[stage] = dataclasses.replace(stages[stage], weight_lag=lag)
    return dataclasses.replace(replica, stages=tuple(stages))


def _lags_and_neighbours(plan: Plan) -> Iterator[Plan]:
    yield from changed(plan, _lag_changes)
    yield from neighbours(plan)


def _lag_changes(replica: Replica) -> Iterator[tuple[Stage, ...]]:
    """Another lag at one stage, or none; the last stages, which have most time for W's at the end, come first."""
    for s in reversed(range(len(replica.stages))):
        stage = replica.stages[s]
        if stage.recompute == "full":
            continue
        others: list[int | None] = [0]
        if (lag := stage.weight_lag) is not None:
            most = replica.num_microbatches(s) - 1
            others = [min(2 * lag + 1, most), min(lag + 1, most), lag - 1 if lag else None, None]
        yield from (_with_lag(replica, s, other).stages for other in dict.fromkeys(others) if other != lag)
