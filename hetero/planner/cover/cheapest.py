"""Looks for covers that cost less per token than the fastest ones.

Price per token is price per hour x seconds per step / tokens per step. For a row of limits on the seconds, from the
shortest step up, the master problem is asked for the cover of least price; the limits differ by ``STEP``, so that a
step's price is within that factor of the least one for its gradient sums. A heuristic: there is no bound on money.
"""

from collections.abc import Sequence

from hetero.planner.cover.cover import Cover, CoverScore, score_cover
from hetero.planner.cover.master_problem import columns_within, find_cover
from hetero.planner.cover.search import MOST_COVERS
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.replica.templates import Template

STEP = 1.3
"""By this factor each limit on the seconds is above the one before. A heuristic."""

LONGEST = 10.0
"""Steps up to so many times the shortest one are looked at. A heuristic."""


def cheaper_covers(
    fastest: Sequence[tuple[Cover, CoverScore]],
    problem: Problem,
    sync_tiers: SyncTiers,
    templates: Sequence[Template],
    deadline: Deadline,
) -> tuple[tuple[Cover, CoverScore], ...]:
    """The covers with the least price per step, among ``fastest`` and those that this search finds."""
    found = dict(fastest)
    if not fastest:
        return ()
    limit_s = min(cover_score.compute_s for cover_score in found.values())
    longest_s = LONGEST * limit_s
    while limit_s < longest_s and not deadline.is_over():
        limit_s *= STEP
        columns = columns_within(templates, problem, compute_s=limit_s)
        answer = find_cover(columns, problem, sync_tiers, sync_s=None, deadline=deadline, cheapest=True)
        if answer.verdict == "found":
            found[answer.cover] = score_cover(answer.cover, problem, sync_tiers)
    return tuple(sorted(found.items(), key=lambda item: item[1].goal_order("money"))[:MOST_COVERS])
