"""Interleaves the stages of finished plans (arXiv 2104.04473, section 2.2) where the simulator says that it pays.

A pipeline of p device groups is filled when a microbatch has been through p - 1 of them, and drained likewise. If each
group holds v stages in turns instead of one, that is the way through stages of a v-th of the length; v times as much
crosses boundaries for it, and activations of more microbatches are held. So it pays where there are few microbatches,
and links that are fast. The search prices pipelines with one stage per group. Here a few numbers of stages and depths
are tried on the best plans, as far as their memory allows; :mod:`hetero.planner.refine` goes on from what is best then.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.clock import Clock
from hetero.planner.finalists import Scored, better, scored, worth
from hetero.planner.problem import Problem
from hetero.planner.refine import ENOUGH
from hetero.spec.parameters import HALF

MOST_STARTS = 4
"""Plans that are interleaved, the best first."""

STAGES_PER_GROUP = (2, 3, 4)

USUAL, DEEP, SHALLOW = 2, 3, 1
"""So many forwards more than the next one does a device group begin with. Two are Megatron's: a microbatch passes on,
and its gradient comes back, one stage after the other. A third hides a link, and with one alone a group waits, but
holds least."""

WORTHWHILE = 0.98
"""A plan is tried if its step could become shorter by this factor."""


def with_interleaving(finalists: Sequence[Scored], problem: Problem, clock: Clock) -> Scored:
    """The first of ``finalists``, or what several stages per device group make of one of them before ``clock`` is over,
    if better."""
    best = finalists[0]
    if not problem.interleaves or problem.costs.runtime.blocking_transfers:
        return best
    enough = ENOUGH * worth(best, problem)
    starts = {start.plan: start for start in finalists[:MOST_STARTS]}.values()
    for start in starts:
        for v in STAGES_PER_GROUP:
            if _least_worth(start, problem, v) >= WORTHWHILE * worth(best, problem):
                continue
            found = _with_depths(start, v, problem, clock)
            if found is None or worth(found, problem) >= worth(start, problem):
                break  # More stages would take more memory, and more of the links.
            if worth(found, problem) < min(enough, worth(best, problem)):
                best = found
    return best


def _with_depths(start: Scored, v: int, problem: Problem, clock: Clock) -> Scored | None:
    """``start`` with ``v`` stages per device group, in whichever depths fit and are best."""
    found = _scored(start.plan, v, USUAL, problem, clock)
    if found is None:
        return _scored(start.plan, v, SHALLOW, problem, clock)
    if worth(found, problem) >= worth(start, problem):
        return found
    return better(found, _scored(start.plan, v, DEEP, problem, clock), problem)


def _least_worth(start: Scored, problem: Problem, v: int) -> float:
    """What the goal would be if the devices that idle least in ``start`` idled a v-th of that; a heuristic, as is that
    they remain those."""
    busy_s = max(times.busy_s + times.update_s for times in start.simulation.stages.values())
    return worth(start, problem) * (busy_s + (start.step_s - busy_s) / v) / start.step_s


def _scored(plan: Plan, v: int, apart: int, problem: Problem, clock: Clock) -> Scored | None:
    """``plan`` with ``v`` stages per device group in every pipeline that can have them; ``None`` if there is no such
    pipeline, if that does not fit, or if ``clock`` is over."""
    replicas = tuple(interleaved(replica, v, apart=apart) or replica for replica in plan.replicas)
    if replicas == plan.replicas or clock.is_over():
        return None
    try:
        return scored(dataclasses.replace(plan, replicas=replicas), problem, clock)
    except (PlanError, ConfigError):
        return None  # Depths of unlike microbatches that deadlock, or a part of a layer that nobody measured.


def interleaved(replica: Replica, v: int, *, apart: int) -> Replica | None:
    """``replica`` with the layers of each device group in ``v`` stages, ``None`` if a group has too few layers, or if
    there is one group only.

    The warm-up of group r of p is apart x (p - r - 1) + (v - 1) p + 1 microbatches. Where these are not of one size, as
    many samples as with the largest.
    """
    groups, p = replica.stages, len(replica.stages)
    if p == 1 or replica.is_interleaved:
        return None
    unit = HALF if any(stage.ends_with_attention for stage in groups) else 1
    if any(stage.num_layers < v * unit for stage in groups):
        return None
    shares = [_shares(int(stage.num_layers / unit), v, reverse=stage is groups[-1]) for stage in groups]
    coarsest = max(stage.samples_per_microbatch for stage in groups)
    stages = []
    start = 0.0
    for k, (r, stage) in itertools.product(range(v), enumerate(groups)):
        end = start + unit * shares[r][k]
        most = replica.num_microbatches(r)
        warm_up = -(-(apart * (p - r - 1) + (v - 1) * p + 1) * coarsest // stage.samples_per_microbatch)
        depth = _shares(min(warm_up, v * most), v, reverse=True)[k]
        stages.append(_part(stage, start, end, in_flight=max(1, depth)))
        start = end
    return dataclasses.replace(replica, stages=tuple(stages))


def _shares(whole: int, v: int, *, reverse: bool) -> list[int]:
    """``whole`` in ``v`` parts that differ by one at most, the smaller ones first, or last: beside the head."""
    parts = [(whole + k) // v for k in range(v)]
    return parts[::-1] if reverse else parts


def _part(stage: Stage, start: float, end: float, *, in_flight: int) -> Stage:
    """Layers ``[start, end)`` as ``stage`` does its own; it recomputes as many in proportion, and where it parts its
    backward, the weights' gradients follow at once."""
    part = dataclasses.replace(
        stage.with_layers(start, end), in_flight=in_flight, wgrad_delay=None if stage.wgrad_delay is None else 0
    )
    if stage.recompute_num_layers is None:
        return part
    held = len(part.layer_numbers)
    count = round(stage.recompute_num_layers * held / len(stage.layer_numbers))
    return dataclasses.replace(part, recompute_num_layers=min(max(1, count), held))
