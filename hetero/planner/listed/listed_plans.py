"""Searches a list of plans for the best one: all of them by a formula, the best of these by the simulator."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetero.cost.capacity import capacity_bytes
from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.replica.stage_options import StageOption
from hetero.planner.scoring import (
    EstimatedPlan,
    ScoredPlan,
    bytes_over_capacity,
    is_within_budget,
    score_plan,
    score_with_smaller_depths,
)
from hetero.planner.time_shares import TimeShare
from hetero.units import GIB

CLOSE = 1.1
"""Plans whose seconds by a formula are above so many times the best simulated ones are not simulated. A heuristic."""

MOST_SIMULATED, SIMULATED_IF_LARGE, LARGE_CLUSTER = 200, 12, 256
"""Plans of one list that are simulated, the best by the formula first; fewer in clusters of more than so many devices,
where each takes longer. A heuristic."""

MICRO_BATCH_SIZES = (1, 2, 4, 8)
"""Samples per microbatch that listed plans may have. A heuristic."""

MOST_STAGES_LISTED = 32
"""Stages that listed plans of unlike pipelines may have. A heuristic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TooLarge:
    """A listed plan that does not fit: its stage that lacks most.

    device: type of its devices; ``tp`` of them hold ``num_layers``.
    needed_bytes: of one device, at the peak; it has ``capacity_bytes``.
    """

    device: str
    tp: int
    num_layers: int
    needed_bytes: int
    capacity_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes

    def __str__(self) -> str:
        needed, has = self.needed_bytes / GIB, self.capacity_bytes / GIB
        layers = f"{self.num_layers} layer{'s' * (self.num_layers > 1)}"
        return (
            f"the closest is short of {self.missing_bytes / GIB:.1f} GiB: {layers} "
            f"at tp {self.tp} take {needed:.1f} of {has:.0f} GiB of a {self.device}"
        )


Listed = EstimatedPlan | TooLarge | Callable[[], TooLarge | None] | None
"""A plan; or what one is short of, said when it is called where that takes time; ``None`` stands for what was looked at
in vain, so that whoever lists can look at the deadline."""

Listing = Iterator[Listed]


def best_plan(
    listing: Iterable[Listed],
    problem: Problem,
    deadline: Deadline,
    *,
    beside: ScoredPlan | None = None,
    note_short: Callable[[TooLarge], None] | None = None,
) -> ScoredPlan | None:
    """Find the fastest of the listed plans within the budget by the simulator: half of the time lists them, half
    simulates the best by the formula; ``None`` if none fits.

    The very best by the formula may take what is left of the time that ``deadline`` is a part of, unless there is a
    plan ``beside`` it already: a deep pipeline takes seconds to simulate, and nothing else says whether all that comes
    later has to be better.

    note_short: is told of what does not fit, until something does.
    """
    if deadline.is_over():
        return None
    until = TimeShare.LISTING.of(deadline)
    listed: list[EstimatedPlan] = []
    for each in itertools.takewhile(lambda _: not until.is_over(), listing):
        if isinstance(each, EstimatedPlan):
            listed.append(each)
        elif note_short is not None and not listed and (short := each() if callable(each) else each) is not None:
            note_short(short)
    if until.ran_out:
        deadline.left_something_out = True
    best: ScoredPlan | None = None
    simulated = 0
    most = MOST_SIMULATED if problem.cluster.num_devices <= LARGE_CLUSTER else SIMULATED_IF_LARGE
    for candidate in sorted(listed, key=lambda candidate: candidate.step_s):
        if deadline.is_over() or (best is not None and (candidate.step_s > CLOSE * best.step_s or simulated >= most)):
            break
        try:
            plan = candidate.make()
            within = deadline if simulated or beside is not None else deadline.whole or deadline
            found = _score_within_budget(plan, problem, within)
        except (PlanError, ConfigError):
            continue  # A grid that tears a tensor-parallel group apart, for instance.
        if found is not None:
            simulated += 1
            if best is None or found.step_s < best.step_s:
                best = found
        elif note_short is not None and best is None and (short := _shortage(plan, problem)) is not None:
            note_short(short)
    return best


def _score_within_budget(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Score ``plan``, with smaller depths where memory is short; ``None`` if it costs or takes too much."""
    if not is_within_budget(plan, problem):
        return None
    return score_plan(plan, problem, deadline) or score_with_smaller_depths(plan, problem, deadline)


def _shortage(plan: Plan, problem: Problem) -> TooLarge | None:
    """The stage of ``plan`` that lacks most memory; ``None`` if none does."""
    over = bytes_over_capacity(plan, problem, plan_memory(plan, problem.costs))
    if not over:
        return None
    r, s = max(over, key=lambda key: over[key])
    stage = plan.replicas[r].stages[s]
    capacity = capacity_bytes(stage, problem.cluster)
    assert capacity is not None, "a problem knows the memory of all of its devices"
    return TooLarge(
        device=stage.device,
        tp=stage.tp,
        num_layers=int(stage.end - stage.start),
        needed_bytes=capacity + over[r, s],
        capacity_bytes=capacity,
    )


def pipeline_shortage(stages: Sequence[tuple[str, int, Sequence[StageOption]]], num_layers: int) -> TooLarge | None:
    """What the stages of a pipeline are short of at their smallest: one microbatch in flight, layers where room is.

    Each stage takes the layers that it has room for, at least one; every layer that is left goes to the stage that
    then lacks least.

    Args:
        stages: the device of each, its tp, and its options.

    Returns:
        The stage that lacks most; ``None`` if there are more stages than layers, or if all layers have room.
    """
    last = len(stages) - 1
    if last >= num_layers or not all(options for _, _, options in stages):
        return None
    ends = [{"first": s == 0, "last": s == last} for s in range(len(stages))]

    def lacks(s: int, layers: int) -> float:
        return min(option.memory.bytes(layers, 1, **ends[s]) - option.capacity_bytes for option in stages[s][2])

    held = [
        max(1, *(option.most_layers(1, **ends[s]) for option in options)) for s, (_, _, options) in enumerate(stages)
    ]
    for _ in range(num_layers - sum(held)):
        s = min(range(len(stages)), key=lambda s: lacks(s, held[s] + 1))
        held[s] += 1
    s = max(range(len(stages)), key=lambda s: lacks(s, held[s]))
    if (missing := lacks(s, held[s])) <= 0:
        return None
    device, tp, (option, *_) = stages[s]
    return TooLarge(
        device=device,
        tp=tp,
        num_layers=held[s],
        needed_bytes=option.capacity_bytes + math.ceil(missing),
        capacity_bytes=option.capacity_bytes,
    )
