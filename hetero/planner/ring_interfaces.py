"""Chooses between finished plans where nobody has measured how many interfaces of a node a ring gets.

Sums of gradients are priced with a ring over several devices of a node on all of the node's interfaces; with a ring on
one of them, other plans may be best. The plan that is chosen is good either way: with t(p) and t'(p) the goal of plan p
in the one case and in the other, it has the least

    max(t(p) / min t,  t'(p) / min t')

among the plans that are looked at (minimax regret: Savage 1951). They are the best ones that were found, and each of
them with the gradient sync that suits rings of one interface, as far as there is time, those of the least regret first.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.plan.ir import Plan
from hetero.planner.deadline import Deadline
from hetero.planner.improve.gradient_sync import choose_gradient_sync
from hetero.planner.problem import Problem
from hetero.planner.scoring import LEAST_GAIN, ScoredPlan, Shortlist, goal_value, score_plan

LEAST_S = 0.5
"""Seconds for it that there are in any case: a plan is to say what it owes to the assumption. A heuristic."""

MOST_WEIGHED = 12
"""Plans that are timed in both cases. A heuristic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingsWithOneInterface:
    """What a plan's step is if a ring has one interface of each node.

    step_s: of the plan.
    passed_over: the shortest of the steps with all interfaces, and what that plan's is with one, where it was not
        chosen for that reason; else ``None``.
    """

    step_s: float
    passed_over: tuple[float, float] | None = None


def good_with_either(
    best: ScoredPlan,
    others: Sequence[ScoredPlan],
    problem: Problem,
    deadline: Deadline,
    *,
    most: float = math.inf,
) -> tuple[ScoredPlan, RingsWithOneInterface | None]:
    """Choose among ``best``, the best of ``others``, and the same with other gradient syncs.

    most: the goal of the chosen plan is not above it, nor is that of ``best``.

    Returns:
        The plan as it is scored for ``problem``, and what is known of it with rings of one interface: ``None`` if the
        cluster leaves nothing open, or if ``deadline`` leaves no time to look.
    """
    if not problem.cluster.leaves_rings_open:
        return best, None
    deadline = deadline.at_least(LEAST_S)
    with_one = dataclasses.replace(problem, cluster=problem.cluster.with_ring_interfaces("one"))
    found: dict[Plan, tuple[ScoredPlan, ScoredPlan]] = {}
    for start in _best_of((best, *others), problem):
        slower = score_plan(start.plan, with_one, deadline)
        if slower is None:
            break
        found[start.plan] = start, slower
    regret = _regret(found, problem)
    for plan in sorted(found, key=lambda plan: regret[plan]):
        suited = choose_gradient_sync(Shortlist(found[plan][1]), with_one, deadline)
        if suited.plan not in found and (scored := score_plan(suited.plan, problem, deadline)) is not None:
            found[suited.plan] = scored, suited
    if best.plan not in found:
        return best, None
    regret = _regret(found, problem)
    chosen = min((plan for plan in regret if goal_value(found[plan][0], problem) <= most), key=regret.__getitem__)
    if regret[chosen] >= (1 - LEAST_GAIN) * regret[best.plan]:
        chosen = best.plan
    fastest = min(found.values(), key=lambda each: goal_value(each[0], problem))
    return found[chosen][0], RingsWithOneInterface(
        step_s=found[chosen][1].step_s,
        passed_over=None if chosen == fastest[0].plan else (fastest[0].step_s, fastest[1].step_s),
    )


def _best_of(plans: Sequence[ScoredPlan], problem: Problem) -> list[ScoredPlan]:
    """The best ones that are not equal."""
    unlike = {each.plan: each for each in plans}.values()
    return sorted(unlike, key=lambda each: goal_value(each, problem))[:MOST_WEIGHED]


def _regret(found: Mapping[Plan, tuple[ScoredPlan, ScoredPlan]], problem: Problem) -> dict[Plan, float]:
    """How many times the best of a case each plan is in its worse case."""
    values = {plan: [goal_value(each, problem) for each in cases] for plan, cases in found.items()}
    least = [min(case) for case in zip(*values.values(), strict=True)]
    return {plan: max(value / low for value, low in zip(case, least, strict=True)) for plan, case in values.items()}
