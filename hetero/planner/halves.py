"""Cuts between the attention and the MLP of a layer, which divide few layers per stage better than whole layers can.

The search divides whole layers. Here halves of layers move between the stages of its finished plans, which the
simulator then judges. A move is worth a simulation only if the longest of the stages that it changes gets shorter.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from hetero.cost.cost_model import CostModel
from hetero.cost.memory import device_memory, plan_memory
from hetero.plan.ir import Plan, Recompute, Replica, Stage
from hetero.planner.problem import Problem
from hetero.spec.parameters import HALF

REACH = 2
"""Half a layer moves by so many stages at most; those between pass one on and so begin and end half a layer later."""

SHORTER = 0.99
"""The longest of the stages that change has to get shorter by this factor."""

MORE: dict[Recompute, Recompute] = {"none": "selective", "selective": "full", "full": "full"}
"""What to recompute where memory is short."""

Stages = tuple[Stage, ...]


def like(replica: Replica, stages: Stages) -> Replica:
    """``stages`` on the ranks of ``replica``."""
    own = (dataclasses.replace(new, ranks=old.ranks) for old, new in zip(replica.stages, stages, strict=True))
    return dataclasses.replace(replica, stages=tuple(own))


def layers_moved(stages: Stages, a: int, b: int, layers: float) -> Stages:
    """``stages`` with so many layers less on ``a`` and more on ``b``; those between shift."""
    held = [s.num_layers - layers * (i == a) + layers * (i == b) for i, s in enumerate(stages)]
    edges = itertools.pairwise(itertools.accumulate(held, initial=0.0))
    return tuple(stage.with_layers(start, end) for stage, (start, end) in zip(stages, edges, strict=True))


def with_halves_moved(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Plans worth a simulation: :func:`levelled`, and single halves moved between stages of one shape of replica."""
    if (level := levelled(plan, problem)) is not None:
        yield level
    for members in plan.alike():
        stages = plan.replicas[members[0]].stages
        if plan.replicas[members[0]].is_interleaved:
            continue  # What is long there is a device, not a stage.
        for a, b in itertools.permutations(range(len(stages)), 2):
            if abs(a - b) <= REACH and stages[a].num_layers > HALF:
                changed = layers_moved(stages, a, b, HALF)
                between = slice(min(a, b), max(a, b) + 1)
                if _is_shorter(changed[between], stages[between], problem.costs):
                    yield _with(plan, members, changed)


def longest_stage_s(plan: Plan, problem: Problem) -> float:
    """Forward and backward per sample of the longest stage."""
    return max(_seconds(stage, problem.costs) for members in plan.alike() for stage in plan.replicas[members[0]].stages)


def levelled(plan: Plan, problem: Problem) -> Plan | None:
    """``plan`` with the stages of every replica as even as halves of layers make them; ``None`` if none is shorter."""
    found = plan
    for members in plan.alike():
        stages = plan.replicas[members[0]].stages
        if plan.replicas[members[0]].is_interleaved:
            continue
        level = _levelled(stages, problem.costs)
        if _is_shorter(level, stages, problem.costs):
            found = _with(found, members, level)
    return found if found is not plan else None


def _levelled(stages: Stages, costs: CostModel) -> Stages:
    """Halves move from the longest stage to whichever other makes the seconds of all stages, longest first, least in
    the order of lists, as long as that helps."""
    best = stages
    while True:
        seconds = [_seconds(stage, costs) for stage in best]
        longest = seconds.index(max(seconds))
        if best[longest].num_layers <= HALF:
            return best
        others = (layers_moved(best, longest, b, HALF) for b in range(len(best)) if b != longest)
        found = min(others, key=lambda each: _longest_first(each, costs), default=best)
        if _longest_first(found, costs) >= sorted(seconds, reverse=True):
            return best
        best = found


def recomputing_more(plan: Plan, problem: Problem, capacity_bytes: Callable[[tuple[int, int]], int]) -> Plan | None:
    """``plan`` with more recomputation where memory is short, until it fits; ``None`` if even all of it is too little.

    capacity_bytes: of a device, by replica and stage.
    """
    for _ in MORE:
        devices = device_memory(plan, plan_memory(plan, problem.costs))
        short = {
            (r, s)
            for r, replica in enumerate(plan.replicas)
            for group in replica.device_groups
            if devices[r, group[0]].total > capacity_bytes((r, group[0]))
            for s in group
        }
        if not short:
            return plan
        replicas = []
        for r, replica in enumerate(plan.replicas):
            stages = [
                # What is computed again in full has no backward that could be split.
                dataclasses.replace(stage, recompute=MORE[stage.recompute], wgrad_delay=None)
                if (r, s) in short
                else stage
                for s, stage in enumerate(replica.stages)
            ]
            replicas.append(dataclasses.replace(replica, stages=tuple(stages)))
        plan = dataclasses.replace(plan, replicas=tuple(replicas))
    return None


def _is_shorter(after: Sequence[Stage], before: Sequence[Stage], costs: CostModel) -> bool:
    return max(_seconds(s, costs) for s in after) < SHORTER * max(_seconds(s, costs) for s in before)


def _longest_first(stages: Sequence[Stage], costs: CostModel) -> list[float]:
    return sorted((_seconds(stage, costs) for stage in stages), reverse=True)


def _seconds(stage: Stage, costs: CostModel) -> float:
    """Forward and backward per sample."""
    return costs.of(stage).microbatch_s / stage.samples_per_microbatch


def _deep_enough(replica: Replica) -> Replica:
    """``replica`` with the depths that 1F1B between equal stages asks for, where they are smaller: stages that were
    shorter than the longest one did with less."""
    coarsest = max(stage.samples_per_microbatch for stage in replica.stages)
    stages = []
    for s, stage in enumerate(replica.stages):
        depth = -(-coarsest * (len(replica.stages) - s) // stage.samples_per_microbatch)
        depth = max(stage.in_flight, min(depth, replica.num_microbatches(s)))
        stages.append(dataclasses.replace(stage, in_flight=depth))
    return dataclasses.replace(replica, stages=tuple(stages))


def _with(plan: Plan, members: Sequence[int], stages: Stages) -> Plan:
    replicas = list(plan.replicas)
    for r in members:
        replicas[r] = _deep_enough(like(replicas[r], stages))
    return dataclasses.replace(plan, replicas=tuple(replicas))
