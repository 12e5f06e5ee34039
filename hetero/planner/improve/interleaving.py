"""Interleaves the stages of finished plans (arXiv 2104.04473, section 2.2) where the simulator says that it pays.

A pipeline of p device groups is filled when a microbatch has been through p - 1 of them, and drained likewise. If each
group holds v stages in turns instead of one, that is the way through stages of a v-th of the length; v times as much
crosses boundaries for it, and activations of more microbatches are held. So it pays where there are few microbatches,
and links that are fast. The search prices pipelines with one stage per group. Here a few numbers of stages and depths
are tried on the best plans, as far as their memory allows, which is a heuristic;
:mod:`hetero.planner.improve.local_search` goes on from what is best then.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.deadline import Deadline
from hetero.planner.improve.plan_changes import PlanChange
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, better_of, goal_value, is_better, score_plan
from hetero.spec.parameters import HALF

MOST_INTERLEAVED = 4
"""Plans that are interleaved, the best first. A heuristic."""

STAGES_PER_GROUP = (2, 3, 4)
"""Stages per device group that are tried, the fewest first. A heuristic."""

USUAL, DEEP, SHALLOW = 2, 3, 1
"""So many forwards more than the next one does a device group begin with. Two are Megatron's: a microbatch passes on,
and its gradient comes back, one stage after the other. A third hides a link, and with one alone a group waits, but
holds least."""

WORTHWHILE = 0.98
"""A plan is tried if its step could become shorter by this factor. A heuristic."""


def interleave(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what several stages per device group make of one of the best ones."""
    best = shortlist.best
    if not problem.interleaves or problem.costs.runtime.blocking_transfers:
        return best
    for start in shortlist.starts(MOST_INTERLEAVED):
        for v in STAGES_PER_GROUP:
            if _goal_if_idle_less(start, problem, v) >= WORTHWHILE * goal_value(best, problem):
                continue
            found = _with_depths(start, v, problem, deadline)
            if found is None or goal_value(found, problem) >= goal_value(start, problem):
                if _divides_evenly(start.plan, v):
                    break  # More stages would take more memory, and more of the links.
                continue  # The smaller stages wait for the larger ones; another number may divide evenly.
            if is_better(found, shortlist.best, problem):
                best = min(best, found, key=lambda each: goal_value(each, problem))
    return best


def interleavings(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """All pipelines with several stages per device group, in the depths that are usual, or those that hold least."""
    if problem.interleaves and not problem.costs.runtime.blocking_transfers:
        for v, apart in itertools.product(STAGES_PER_GROUP[:2], (USUAL, SHALLOW)):
            yield partial(_all_interleaved, plan, v, apart)


def _all_interleaved(plan: Plan, v: int, apart: int) -> Plan:
    pipelines = ((r, interleaved(replica, v, apart=apart)) for r, replica in enumerate(plan.replicas))
    return plan.with_replicas({r: pipeline for r, pipeline in pipelines if pipeline is not None})


def _divides_evenly(plan: Plan, v: int) -> bool:
    """Whether ``v`` stages per device group would have equally many layers, or halves of one where there are halves."""
    unit = HALF if any(stage.ends_with_attention for _, _, stage in plan.stages()) else 1
    return all(stage.num_layers / unit % v == 0 for _, _, stage in plan.stages())


def _with_depths(start: ScoredPlan, v: int, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Try ``v`` stages per device group of ``start``, in whichever depths fit and are best."""
    found = _score_interleaved(start.plan, v, USUAL, problem, deadline)
    if found is None:
        return _score_interleaved(start.plan, v, SHALLOW, problem, deadline)
    if goal_value(found, problem) >= goal_value(start, problem):
        return found
    return better_of(found, _score_interleaved(start.plan, v, DEEP, problem, deadline), problem)


def _goal_if_idle_less(start: ScoredPlan, problem: Problem, v: int) -> float:
    """Estimate the goal if the devices that idle least in ``start`` idled a v-th of that; a heuristic, as is that they
    remain those."""
    busy_s = max(times.busy_s + times.update_s for times in start.simulation.stages.values())
    return goal_value(start, problem) * (busy_s + (start.step_s - busy_s) / v) / start.step_s


def _score_interleaved(plan: Plan, v: int, apart: int, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Score ``plan`` with ``v`` stages per device group in every pipeline that can have them; ``None`` if there is no
    such pipeline, if that does not fit, or if ``deadline`` is over."""
    changed = _all_interleaved(plan, v, apart)
    if changed == plan or deadline.is_over():
        return None
    try:
        return score_plan(changed, problem, deadline)
    except (PlanError, ConfigError):
        return None  # Depths of unlike microbatches that deadlock, or a part of a layer that nobody measured.


def interleaved(replica: Replica, v: int, *, apart: int) -> Replica | None:
    """Cut the layers of each device group of ``replica`` into ``v`` stages; ``None`` if a group has too few layers, or
    if there is one group only.

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
    return replica.with_stages(stages)


def _shares(whole: int, v: int, *, reverse: bool) -> list[int]:
    """Divide ``whole`` into ``v`` parts that differ by one at most, the smaller ones first, or last: beside the
    head."""
    parts = [(whole + k) // v for k in range(v)]
    return parts[::-1] if reverse else parts


def _part(stage: Stage, start: float, end: float, *, in_flight: int) -> Stage:
    """The part of ``stage`` with layers ``[start, end)``: it recomputes as many in proportion, and where its backward
    is split, the weights' gradients follow at once."""
    part = dataclasses.replace(
        stage.with_layers(start, end), in_flight=in_flight, wgrad_delay=None if stage.wgrad_delay is None else 0
    )
    if stage.recompute_num_layers is None:
        return part
    held = len(part.layer_numbers)
    count = round(stage.recompute_num_layers * held / len(stage.layer_numbers))
    return dataclasses.replace(part, recompute_num_layers=min(max(1, count), held))
