"""Searches a list of plans for the best one: all of them by a formula, the best of these by the simulator."""

import itertools
from collections.abc import Iterable, Iterator

from hetero.errors import ConfigError, PlanError
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan, ScoredPlan, score_plan, score_with_smaller_depths
from hetero.planner.time_shares import TimeShare

CLOSE = 1.1
"""Plans whose seconds by a formula are above so many times the best simulated ones are not simulated. A heuristic."""

MOST_SIMULATED, SIMULATED_IF_LARGE, LARGE_CLUSTER = 200, 12, 256
"""Plans of one list that are simulated, the best by the formula first; fewer in clusters of more than so many devices,
where each takes longer. A heuristic."""

MICRO_BATCH_SIZES = (1, 2, 4, 8)
"""Samples per microbatch that listed plans may have. A heuristic."""

MOST_STAGES_LISTED = 32
"""Stages that listed plans of unlike pipelines may have. A heuristic."""

Listing = Iterator[EstimatedPlan | None]
"""``None`` stands for what was looked at in vain, so that whoever lists can look at the deadline."""


def best_plan(
    listing: Iterable[EstimatedPlan | None],
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
    listed = [each for each in itertools.takewhile(lambda _: not until.is_over(), listing) if each is not None]
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
