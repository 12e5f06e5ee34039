"""Searches a list of plans for the best one: all of them by a formula, the best of these by the simulator."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hetero.errors import ConfigError, PlanError
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan, ScoredPlan, score_plan, score_with_smaller_depths
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


Listing = Iterator[EstimatedPlan | TooLarge | None]
"""``None`` stands for what was looked at in vain, so that whoever lists can look at the deadline."""


def best_plan(
    listing: Iterable[EstimatedPlan | TooLarge | None],
    problem: Problem,
    deadline: Deadline,
    *,
    beside: ScoredPlan | None = None,
) -> ScoredPlan | None:
    """Find the best of the listed plans by the simulator: half of the time lists them, half simulates the best by the
    formula; ``None`` if none fits.

    The very best by the formula may take what is left of the time that ``deadline`` is a part of, unless there is a
    plan ``beside`` it already: a deep pipeline takes seconds to simulate, and nothing else says whether all that comes
    later has to be better.
    """
    if deadline.is_over():
        return None
    until = TimeShare.LISTING.of(deadline)
    looked_at = itertools.takewhile(lambda _: not until.is_over(), listing)
    listed = [each for each in looked_at if isinstance(each, EstimatedPlan)]
    if until.left_s == 0:
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
            found = score_plan(plan, problem, within) or score_with_smaller_depths(plan, problem, within)
        except (PlanError, ConfigError):
            continue  # A grid that tears a tensor-parallel group apart, for instance.
        if found is not None:
            simulated += 1
            if best is None or found.step_s < best.step_s:
                best = found
    return best
