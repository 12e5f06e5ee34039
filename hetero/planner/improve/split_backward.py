"""Splits backwards of finished plans (zero bubble, arXiv 2401.10241) where the simulator says that it pays.

The search prices whole backwards. A split one shortens the way of a gradient to the first stage, on which all stages
wait at both ends of a step and, where in-flight depths are short of memory, in between; it costs memory for what waits
for its weights' gradients. So a few delays are tried on the best plans, as far as memory allows, and from the best
of them a few small changes more. A heuristic: no bound says what other delays could do.
"""

import itertools
import math
from collections.abc import Callable, Iterator

from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.local_search import neighbours, search_locally, with_alike_changed
from hetero.planner.improve.replica_changes import may_split
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, bytes_over_capacity, goal_value, is_better, score_plan

MOST_SPLIT = 4
"""Plans that are split, the best first. A heuristic."""

MOST_CHANGES = 20
"""Plans that are looked at from the best split one on. A heuristic."""

Delay = Callable[[Replica, int], int]


def _by_position(replica: Replica, stage: int) -> int:
    """Delay as in ZB-H1: the later a stage, the more W's it has time for after its last I."""
    return stage


def _by_depth(replica: Replica, stage: int) -> int:
    """Delay by what a stage has less in flight than the first one, in its own microbatches, so that all hold equally
    many."""
    first, here = replica.stages[0], replica.stages[stage]
    samples = first.in_flight * first.samples_per_microbatch - here.in_flight * here.samples_per_microbatch
    return max(0, samples // here.samples_per_microbatch)


def _at_once(replica: Replica, stage: int) -> int:
    """Delay nothing: the way of a gradient to the first stage is shorter all the same."""
    return 0


def _last_at_the_end(replica: Replica, stage: int) -> int:
    """Delay nothing but on the last stage, and there all: what goes back to the others is on its way as soon as can be,
    so that the last stage may have more layers."""
    return replica.num_microbatches(stage) - 1 if stage == len(replica.stages) - 1 else 0


DELAY_RULES: tuple[Delay, ...] = (_by_position, _by_depth, _at_once, _last_at_the_end)


def split_backwards(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what split backwards make of one of the best ones."""
    best = shortlist.best
    if not problem.delays_weight_gradients:
        return best
    tried: set[Plan] = set()
    for start, delay in itertools.product(shortlist.starts(MOST_SPLIT), DELAY_RULES):
        plan = with_delays(start.plan, delay)
        if plan in tried or plan == start.plan:
            continue
        if deadline.is_over():
            break
        tried.add(plan)
        found = _score_split(plan, problem, deadline)
        if found is not None and is_better(found, shortlist.best, problem):
            best = min(best, found, key=lambda each: goal_value(each, problem))
    if best is shortlist.best:
        return best
    return search_locally(best, problem, deadline, neighbours=_delays_and_neighbours, most=MOST_CHANGES)


def with_delays(plan: Plan, delay: Delay) -> Plan:
    """``plan`` with the delays of this rule in every pipeline, on all stages that can split their backward."""
    return plan.with_replicas(
        {
            r: replica.with_each_stage(
                wgrad_delay=[_split_delay(replica, s, delay) for s in range(len(replica.stages))]
            )
            for r, replica in enumerate(plan.replicas)
            if len(replica.stages) > 1
        }
    )


def _split_delay(replica: Replica, stage: int, delay: Delay) -> int | None:
    if not may_split(replica.stages[stage]):
        return replica.stages[stage].wgrad_delay
    return min(delay(replica, stage), replica.num_microbatches(stage) - 1)


def _score_split(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Score ``plan``, with smaller delays or none where a stage lacks memory; ``None`` if that does not help."""
    try:
        if (found := score_plan(plan, problem, deadline)) is not None:
            return found
    except ConfigError:
        return None  # The profiles of a device have no backward of a block that could be divided.
    changed: dict[int, Replica] = {}
    memory = plan_memory(plan, problem.costs)
    for (r, s), over in bytes_over_capacity(plan, problem, memory).items():
        replica = changed.get(r, plan.replicas[r])
        delay = replica.stages[s].wgrad_delay
        if delay is None or replica.is_interleaved:
            return None
        changed[r] = replica.with_stage(s, wgrad_delay=smaller_delay(delay, deferred=memory[r, s].deferred, over=over))
    return score_plan(plan.with_replicas(changed), problem, deadline)


def smaller_delay(delay: int, *, deferred: int, over: int) -> int | None:
    """The delay that saves about ``over`` bytes of ``deferred``, which up to ``delay`` + 1 microbatches hold; ``None``
    if smaller ones do not help."""
    if delay == 0 or deferred == 0:
        return None
    return max(0, delay - math.ceil(over * (delay + 1) / deferred))


def _delays_and_neighbours(plan: Plan) -> Iterator[Plan]:
    yield from with_alike_changed(plan, _delay_changes)
    yield from neighbours(plan)


def _delay_changes(replica: Replica) -> Iterator[Replica]:
    """Another delay at one stage, or none; the last stages, which have most time for W's at the end, come first."""
    for s in reversed(range(len(replica.stages))):
        stage = replica.stages[s]
        if not may_split(stage):
            continue
        others: list[int | None] = [0]
        if (delay := stage.wgrad_delay) is not None:
            most = replica.num_microbatches(s) - 1
            others = [min(2 * delay + 1, most), min(delay + 1, most), delay - 1 if delay else None, None]
        yield from (replica.with_stage(s, wgrad_delay=other) for other in dict.fromkeys(others) if other != delay)
