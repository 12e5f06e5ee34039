"""Searches among whole plans until its time is over: changes of all kinds, alone and one upon the other, judged by the
simulator.

The passes before this one follow rules about what pays. Here everything that a plan says may change
(:mod:`.replica_changes`, :mod:`.plan_changes`), in an order that the problem's seed decides. A climb takes every change
that helps until none does; a walk then makes changes one upon the other and accepts what is a little worse, less and
less of that (threshold accepting, Dueck and Scheuer 1990), since a layer that moves together with a recomputation can
help where neither alone does. What a walk finds is climbed from again. Walks start from the best plan, and in turns
from the best different ones of the shortlist. All of it is a heuristic, without a bound.

A change whose step is above what would be accepted by a bound already (:mod:`hetero.cost.simulation.step_bound`) is not
simulated. Effort is counted in plans that are looked at, so that the same seed and limit give the same plan.
"""

import random
from collections.abc import Iterator

from hetero.cost.memory import plan_memory
from hetero.cost.simulation.step_bound import least_step_s
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.plan_changes import PlanChange, families
from hetero.planner.improve.replica_changes import one_layer_more_recomputed
from hetero.planner.problem import Problem
from hetero.planner.scoring import (
    LEAST_GAIN,
    ScoredPlan,
    Shortlist,
    bytes_over_capacity,
    goal_value,
    is_better,
    price_per_hour,
    score_plan,
    score_with_smaller_depths,
    scoring_s,
)

MOST_STARTS = 4
"""Plans of the shortlist that walks start from, beside the best one so far. A heuristic."""

WALK = 250
"""Changes that a walk looks at. A heuristic."""

WORSE = 0.01
"""By how much worse than before a walk accepts a plan at its beginning. A heuristic."""

FAR = 1.15
"""A start whose goal is above so many times the best one's is left out. A heuristic."""

WALKS_IN_VAIN = 8
"""So many walks without a better plan, one after the other, end the search. A heuristic."""

CHANGED_SHARE = 0.5
"""Of the time of scoring a plan, for one that has most parts in common with those before. A heuristic."""

MOST_RECOMPUTED_MORE = 4
"""Layers at most that are recomputed more where a change lacks memory. A heuristic."""


def search_whole_plans(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what a search among whole plans makes of it or of another one of the shortlist."""
    if deadline.is_over():
        return shortlist.best
    return _Search(shortlist, problem, deadline).run()


class _Search:
    """One search, and the best plan that it has found."""

    def __init__(self, shortlist: Shortlist, problem: Problem, deadline: Deadline) -> None:
        self._problem, self._deadline = problem, deadline
        self._dice = random.Random(problem.seed)
        self._families = families()
        self.best = shortlist.best
        self._starts = [
            start
            for start in shortlist.starts(MOST_STARTS)[1:]
            if goal_value(start, problem) < FAR * goal_value(self.best, problem)
        ]

    def run(self) -> ScoredPlan:
        self._climb(self.best)
        in_vain = number = 0
        while in_vain < WALKS_IN_VAIN + len(self._starts) and not self._deadline.is_over():
            before = self.best
            # Every third walk starts elsewhere, as long as there is another start.
            elsewhere = number % 3 == 2 and self._starts
            found = self._walk(self._climb(self._starts.pop(0)) if elsewhere else self.best)
            if found.plan != before.plan:
                self._climb(found)
            in_vain = 0 if is_better(self.best, before, self._problem) else in_vain + 1
            number += 1
        return self.best

    def _climb(self, current: ScoredPlan) -> ScoredPlan:
        """Take changes that help until none does."""
        improved = True
        while improved:
            improved = False
            changes = [change for family in self._families for change in family(current.plan, self._problem)]
            self._dice.shuffle(changes)
            for change in changes:
                if self._deadline.is_over():
                    return current
                most = (1 - LEAST_GAIN) * goal_value(current, self._problem)
                found = self._scored(change, current, most)
                if found is not None and goal_value(found, self._problem) < most:
                    current, improved = self._noted(found), True
                    break
        return current

    def _walk(self, start: ScoredPlan) -> ScoredPlan:
        """The best plan but ``start`` of a walk from there, or ``start`` if there is none."""
        current, best = start, None
        for step in range(WALK):
            if self._deadline.is_over():
                break
            change = self._some_change(current.plan)
            most = (1 + WORSE * (1 - step / WALK) * self._dice.random()) * goal_value(current, self._problem)
            found = self._scored(change, current, most) if change is not None else None
            if found is None or goal_value(found, self._problem) > most:
                continue
            current = self._noted(found)
            if best is None or goal_value(current, self._problem) < goal_value(best, self._problem):
                best = current
        return start if best is None else best

    def _some_change(self, plan: Plan) -> PlanChange | None:
        """A random change of a random kind, or two of them, one upon the other."""
        first = self._one_of(self._dice.choice(self._families)(plan, self._problem))
        if first is None or self._dice.random() < 0.5:
            return first
        family = self._dice.choice(self._families)

        def both() -> Plan:
            changed = first()
            second = self._one_of(family(changed, self._problem))
            return changed if second is None else second()

        return both

    def _one_of(self, changes: Iterator[PlanChange]) -> PlanChange | None:
        listed = list(changes)
        return self._dice.choice(listed) if listed else None

    def _noted(self, found: ScoredPlan) -> ScoredPlan:
        if goal_value(found, self._problem) < goal_value(self.best, self._problem):
            self.best = found
        return found

    def _scored(self, change: PlanChange, current: ScoredPlan, most: float) -> ScoredPlan | None:
        """Score what ``change`` makes; ``None`` if it is not legal, does not fit, or has a goal above ``most`` by a
        bound already."""
        try:
            plan = change()
            if plan == current.plan or not self._could_be_below(plan, most):
                return None
            if not self._deadline.has(CHANGED_SHARE * scoring_s(plan)):
                return None
            found = score_plan(plan, self._problem) or score_with_smaller_depths(plan, self._problem, self._deadline)
            if found is None and (more := self._recomputing_more(plan)) is not None and more != plan:
                could_be = self._could_be_below(more, most)
                found = score_plan(more, self._problem, self._deadline) if could_be else None
        except (PlanError, ConfigError, ZeroDivisionError):
            return None  # A microbatch that does not divide, for instance, or a size that nobody measured.
        return found

    def _could_be_below(self, plan: Plan, most: float) -> bool:
        problem = self._problem
        if problem.budget_per_hour is not None and price_per_hour(plan, problem) > problem.budget_per_hour:
            return False
        least = least_step_s(plan, problem.costs)
        if problem.goal == "money":
            least *= price_per_hour(plan, problem) / 3600
        return least <= most

    def _recomputing_more(self, plan: Plan) -> Plan | None:
        """``plan`` with as many layers more recomputed as memory asks for, where a few are enough."""
        for _ in range(MOST_RECOMPUTED_MORE):
            over = bytes_over_capacity(plan, self._problem, plan_memory(plan, self._problem.costs))
            if not over or self._deadline.is_over():
                return None if over else plan
            changed: dict[int, Replica] = {}
            for r, s in over:
                more = one_layer_more_recomputed(changed.get(r, plan.replicas[r]), s)
                if more is None or more.is_interleaved:
                    return None
                changed[r] = more
            plan = plan.with_replicas(changed)
        return None
