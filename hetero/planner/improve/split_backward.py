"""Splits backwards of finished plans (zero bubble, arXiv 2401.10241) where the simulator says that it pays.

The search prices whole backwards. A split one shortens the way of a gradient to the first stage, on which all stages
wait at both ends of a step and, where in-flight depths are short of memory, in between; it costs memory for what waits
for its weights' gradients. So a few lags are tried on the best plans, as far as their memory allows, and from the best
of them a few small changes more. A heuristic: no bound says what other lags could do.
"""

import itertools
import math
from collections.abc import Callable, Iterator

from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.local_search import neighbours, search_locally, with_alike_changed
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, bytes_over_capacity, goal_value, is_better, score_plan

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


def split_backwards(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what split backwards make of one of the best ones."""
    best = shortlist.best
    if not problem.splits_backward or problem.costs.traits.blocking_transfers:
        return best
    tried: set[Plan] = set()
    for start, lag in itertools.product(shortlist.starts(MOST_STARTS), LAGS):
        plan = _split(start.plan, lag)
        if plan in tried or plan == start.plan:
            continue
        if deadline.is_over():
            break
        tried.add(plan)
        found = _score(plan, problem, deadline)
        if found is not None and is_better(found, shortlist.best, problem):
            best = min(best, found, key=lambda each: goal_value(each, problem))
    if best is shortlist.best:
        return best
    return search_locally(best, problem, deadline, neighbours=_lags_and_neighbours, most=MOST_CHANGES)


def _split(plan: Plan, lag: Lag) -> Plan:
    """``plan`` with the lags of this rule in every pipeline, on all stages that can split their backward."""
    return plan.with_replicas(
        {
            r: replica.with_each_stage(weight_lag=[_split_lag(replica, s, lag) for s in range(len(replica.stages))])
            for r, replica in enumerate(plan.replicas)
            if len(replica.stages) > 1
        }
    )


def _split_lag(replica: Replica, stage: int, lag: Lag) -> int | None:
    if replica.stages[stage].recompute == "full":
        return replica.stages[stage].weight_lag
    return min(lag(replica, stage), replica.num_microbatches(stage) - 1)


def _score(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Score ``plan``, with smaller lags or none where a stage is short of memory; ``None`` if that does not help."""
    try:
        if (found := score_plan(plan, problem, deadline)) is not None:
            return found
    except ConfigError:
        return None  # The profiles of a device have no backward of a block that could be divided.
    changed: dict[int, Replica] = {}
    memory = plan_memory(plan, problem.costs)
    for (r, s), over in bytes_over_capacity(plan, problem, memory).items():
        replica = changed.get(r, plan.replicas[r])
        lag = replica.stages[s].weight_lag
        if lag is None or replica.is_interleaved:
            return None
        changed[r] = replica.with_stage(s, weight_lag=smaller_lag(lag, deferred=memory[r, s].deferred, over=over))
    return score_plan(plan.with_replicas(changed), problem, deadline)


def smaller_lag(lag: int, *, deferred: int, over: int) -> int | None:
    """The lag that makes about ``over`` bytes less of ``deferred``, which up to ``lag`` + 1 microbatches hold; ``None``
    if smaller ones do not help."""
    if lag == 0 or deferred == 0:
        return None
    return max(0, lag - math.ceil(over * (lag + 1) / deferred))


def _lags_and_neighbours(plan: Plan) -> Iterator[Plan]:
    yield from with_alike_changed(plan, _lag_changes)
    yield from neighbours(plan)


def _lag_changes(replica: Replica) -> Iterator[Replica]:
    """Another lag at one stage, or none; the last stages, which have most time for W's at the end, come first."""
    for s in reversed(range(len(replica.stages))):
        stage = replica.stages[s]
        if stage.recompute == "full":
            continue
        others: list[int | None] = [0]
        if (lag := stage.weight_lag) is not None:
            most = replica.num_microbatches(s) - 1
            others = [min(2 * lag + 1, most), min(lag + 1, most), lag - 1 if lag else None, None]
        yield from (replica.with_stage(s, weight_lag=other) for other in dict.fromkeys(others) if other != lag)
