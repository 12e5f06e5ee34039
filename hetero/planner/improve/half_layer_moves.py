"""Moves halves of layers between stages: a cut between the attention and the MLP of a layer divides few layers more
evenly than whole ones can.

The search divides whole layers. Here halves move between the stages of its finished plans. A move is worth a
simulation only if the longest of the stages that it changes gets shorter; both that and the limits below are
heuristics.
"""

import itertools
from collections.abc import Iterator, Sequence

from hetero.cost.cost_model import CostModel
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.problem import Problem
from hetero.spec.parameters import HALF

REACH = 2
"""Half a layer moves by so many stages at most; those between pass one on and so begin and end half a layer later."""

SHORTER = 0.99
"""The longest of the stages that change has to get shorter by this factor."""


def with_half_layers_moved(plan: Plan, problem: Problem) -> Iterator[Plan]:
    """Plans worth a simulation: :func:`levelled`, and single halves moved between stages of replicas that are alike."""
    if (levelled_plan := levelled(plan, problem)) is not None:
        yield levelled_plan
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        if replica.is_interleaved:
            continue  # What is long there is a device, not a stage.
        for a, b in itertools.permutations(range(len(replica.stages)), 2):
            if abs(a - b) <= REACH and replica.stages[a].num_layers > HALF:
                changed = replica.with_layers_moved(a, b, HALF)
                between = slice(min(a, b), max(a, b) + 1)
                if _is_shorter(changed.stages[between], replica.stages[between], problem.costs):
                    yield plan.with_alike(members, _deep_enough(changed))


def levelled(plan: Plan, problem: Problem) -> Plan | None:
    """``plan`` with the stages of every replica as even as half layers make them; ``None`` if none gets shorter."""
    found = plan
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        if replica.is_interleaved:
            continue
        levelled_replica = _levelled(replica, problem.costs)
        if _is_shorter(levelled_replica.stages, replica.stages, problem.costs):
            found = found.with_alike(members, _deep_enough(levelled_replica))
    return found if found is not plan else None


def longest_stage_s(plan: Plan, problem: Problem) -> float:
    """Seconds of forward and backward per sample on the longest stage."""
    return max(_seconds(stage, problem.costs) for members in plan.alike() for stage in plan.replicas[members[0]].stages)


def _levelled(replica: Replica, costs: CostModel) -> Replica:
    """Move halves from the longest stage to whichever other makes the seconds of all stages, longest first, least in
    the order of lists, as long as that helps."""
    best = replica
    while True:
        seconds = [_seconds(stage, costs) for stage in best.stages]
        longest = seconds.index(max(seconds))
        if best.stages[longest].num_layers <= HALF:
            return best
        others = (best.with_layers_moved(longest, b, HALF) for b in range(len(best.stages)) if b != longest)
        found = min(others, key=lambda each: _longest_first(each, costs), default=best)
        if _longest_first(found, costs) >= sorted(seconds, reverse=True):
            return best
        best = found


def _is_shorter(after: Sequence[Stage], before: Sequence[Stage], costs: CostModel) -> bool:
    return max(_seconds(s, costs) for s in after) < SHORTER * max(_seconds(s, costs) for s in before)


def _longest_first(replica: Replica, costs: CostModel) -> list[float]:
    return sorted((_seconds(stage, costs) for stage in replica.stages), reverse=True)


def _seconds(stage: Stage, costs: CostModel) -> float:
    """Seconds of forward and backward per sample."""
    return costs.of(stage).microbatch_s / stage.samples_per_microbatch


def _deep_enough(replica: Replica) -> Replica:
    """Deepen stages to what 1F1B between equal ones asks for: stages that were shorter than the longest one did with
    less."""
    coarsest = max(stage.samples_per_microbatch for stage in replica.stages)
    depths = []
    for s, stage in enumerate(replica.stages):
        depth = -(-coarsest * (len(replica.stages) - s) // stage.samples_per_microbatch)
        depths.append(max(stage.in_flight, min(depth, replica.num_microbatches(s))))
    return replica.with_each_stage(in_flight=depths)
