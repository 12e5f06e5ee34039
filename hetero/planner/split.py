"""Splits backwards of finished plans (zero bubble, arXiv 2401.10241) where the simulator says that it pays.

The search prices whole backwards. A split one shortens the way of a gradient to the first stage, on which all stages
wait at both ends of a step and, where in-flight depths are short of memory, in between; it costs memory for what waits
for its weights' gradients. So a few delays are tried on the best plans, as far as memory allows, and from the best
of them a few small changes more.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.clock import Clock
from hetero.planner.finalists import Scored, scored, short_bytes, worth
from hetero.planner.problem import Problem
from hetero.planner.refine import ENOUGH, changed, neighbours, refined

MOST_STARTS = 4
"""Plans that are split, the best first."""

MOST_CHANGES = 20
"""Plans that are looked at from the best split one on."""

Delay = Callable[[Replica, int], int]


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


LAGS: tuple[Delay, ...] = (_by_position, _by_depth, _at_once)


def with_split_backwards(finalists: Sequence[Scored], problem: Problem, clock: Clock) -> Scored:
    """The first of ``finalists``, or what split backwards make of one of them before ``clock`` is over, if better."""
    best = finalists[0]
    if not problem.splits_backward or problem.costs.runtime.blocking_transfers:
        return best
    enough = ENOUGH * worth(best, problem)
    tried: set[Plan] = set()
    for start, delay in itertools.product(finalists[:MOST_STARTS], LAGS):
        plan = _split(start.plan, delay)
        if plan in tried or plan == start.plan:
            continue
        if clock.is_over():
            break
        tried.add(plan)
        found = _scored(plan, problem, clock)
        if found is not None and worth(found, problem) < min(enough, worth(best, problem)):
            best = found
    if best is finalists[0]:
        return best
    return refined(best, problem, clock, neighbours=_delays_and_neighbours, most=MOST_CHANGES)


def _split(plan: Plan, delay: Delay) -> Plan:
    """``plan`` with the delays of this rule in every pipeline, on all stages that can split their backward."""
    replicas = []
    for replica in plan.replicas:
        stages = list(replica.stages)
        if len(stages) > 1:
            for s, stage in enumerate(stages):
                if stage.recompute != "full":
                    last = replica.num_microbatches(s) - 1
                    stages[s] = dataclasses.replace(stage, wgrad_delay=min(delay(replica, s), last))
        replicas.append(dataclasses.replace(replica, stages=tuple(stages)))
    return dataclasses.replace(plan, replicas=tuple(replicas))


def _scored(plan: Plan, problem: Problem, clock: Clock) -> Scored | None:
    """As :func:`scored`, with smaller delays or none where a stage lacks memory; ``None`` if that does not help."""
    try:
        if (found := scored(plan, problem, clock)) is not None:
            return found
    except ConfigError:
        return None  # The profiles of a device have no backward of a block that could be divided.
    replicas = list(plan.replicas)
    memory = plan_memory(plan, problem.costs)
    for (r, s), over in short_bytes(plan, problem, memory).items():
        delay = replicas[r].stages[s].wgrad_delay
        if delay is None or replicas[r].is_interleaved:
            return None
        replicas[r] = _with_delay(replicas[r], s, smaller_delay(delay, deferred=memory[r, s].deferred, over=over))
    return scored(dataclasses.replace(plan, replicas=tuple(replicas)), problem, clock)


def smaller_delay(delay: int, *, deferred: int, over: int) -> int | None:
    """The delay that saves about ``over`` bytes of ``deferred``, which up to ``delay`` + 1 microbatches hold; ``None``
    if smaller ones do not help."""
    if delay == 0 or deferred == 0:
        return None
    return max(0, delay - math.ceil(over * (delay + 1) / deferred))


def _with_delay(replica: Replica, stage: int, delay: int | None) -> Replica:
    stages = list(replica.stages)
    stages[stage] = dataclasses.replace(stages[stage], wgrad_delay=delay)
    return dataclasses.replace(replica, stages=tuple(stages))


def _delays_and_neighbours(plan: Plan) -> Iterator[Plan]:
    yield from changed(plan, _delay_changes)
    yield from neighbours(plan)


def _delay_changes(replica: Replica) -> Iterator[tuple[Stage, ...]]:
    """Another delay at one stage, or none; the last stages, which have most time for W's at the end, come first."""
    for s in reversed(range(len(replica.stages))):
        stage = replica.stages[s]
        if stage.recompute == "full":
            continue
        others: list[int | None] = [0]
        if (delay := stage.wgrad_delay) is not None:
            most = replica.num_microbatches(s) - 1
            others = [min(2 * delay + 1, most), min(delay + 1, most), delay - 1 if delay else None, None]
        yield from (_with_delay(replica, s, other).stages for other in dict.fromkeys(others) if other != delay)
