"""Makes plans of the best covers and scores them by the simulator.

The search prices a step by a formula; among covers that are close together the simulator has the last word. It also
decides whether depths beyond the smallest ones pay where memory holds them.
"""

import math
from collections.abc import Callable, Iterable

from hetero.plan.ir import Plan
from hetero.planner.cover.cover import Cover
from hetero.planner.cover.expand import expand
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, goal_value, score_if_legal

EXTRA_DEPTHS = (0, 1, 2)
"""Microbatches in flight beyond the smallest depths that are tried. A heuristic."""


def scored_covers(
    covers: Iterable[Cover], problem: Problem, deadline: Deadline, *, finish: Callable[[ScoredPlan], ScoredPlan]
) -> list[ScoredPlan]:
    """Plans of the covers that are legal and fit, the best first: of each cover its best one, unless another cover's is
    better than its compute alone.

    finish: makes the most of a plan before it is compared, without a change to its compute.
    """
    of_covers: list[ScoredPlan] = []
    least = math.inf
    for cover in covers:
        seen: set[Plan] = set()
        best: ScoredPlan | None = None
        for extra_depth in EXTRA_DEPTHS:
            if deadline.is_over():
                break
            plan = expand(cover, problem, extra_depth=extra_depth)
            if plan in seen:
                continue
            seen.add(plan)
            # Of the very best by the formula at least a plan is made: it may take what is left.
            first = not of_covers and best is None
            candidate = score_if_legal(plan, problem, deadline.whole or deadline if first else deadline)
            if candidate is None or _goal_of_compute_alone(candidate, problem) >= least:
                continue
            candidate = finish(candidate)
            if best is None or goal_value(candidate, problem) < goal_value(best, problem):
                best = candidate
                least = min(least, goal_value(best, problem))
        if best is not None:
            of_covers.append(best)
    return sorted(of_covers, key=lambda each: goal_value(each, problem))


def _goal_of_compute_alone(candidate: ScoredPlan, problem: Problem) -> float:
    """Tell what the goal would be if nothing but the compute took time."""
    return goal_value(candidate, problem) * candidate.simulation.compute_end_s / candidate.step_s
