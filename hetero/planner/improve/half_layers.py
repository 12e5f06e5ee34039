"""Levels the stages of good covers' plans by half layers, and searches on from the best of them.

Covers are chosen by whole layers, so one that only halves make the best is looked at here once more, before the
simulator. Only those are simulated whose step by the formula, shorter as the longest stage gets, may be below that of
the best plan; a heuristic, since a formula errs.
"""

from collections.abc import Iterable

from hetero.planner.deadline import Deadline
from hetero.planner.improve.half_layer_moves import levelled, longest_stage_s
from hetero.planner.improve.local_search import search_locally
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan, ScoredPlan, Shortlist, better_of, goal_value, score_if_legal
from hetero.planner.time_shares import TimeShare

FORMULA_ERROR = 1.03
"""The formula's step is mostly within this factor of the simulator's. A heuristic."""


def cut_layers_in_half(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what a local search makes of the best levelled one of the estimated plans, if that is better to
    begin with."""
    best = shortlist.best
    levelled_plan = best_levelled(shortlist.estimated, problem, deadline, below_s=best.step_s)
    if levelled_plan is None or goal_value(levelled_plan, problem) >= goal_value(best, problem):
        return best
    return search_locally(levelled_plan, problem, TimeShare.LEVELLED_SEARCH.of(deadline))


def best_levelled(
    estimated: Iterable[EstimatedPlan], problem: Problem, deadline: Deadline, *, below_s: float
) -> ScoredPlan | None:
    """The best of the plans whose stages half layers level and that may be below ``below_s``; ``None`` if there are
    none."""
    best: ScoredPlan | None = None
    for each in estimated:
        if deadline.is_over():
            break
        plan = each.make()
        levelled_plan = levelled(plan, problem)
        if levelled_plan is None:
            continue
        shorter = longest_stage_s(levelled_plan, problem) / longest_stage_s(plan, problem)
        if shorter * each.step_s < FORMULA_ERROR * below_s:
            best = better_of(best, score_if_legal(levelled_plan, problem, deadline), problem)
    return best
