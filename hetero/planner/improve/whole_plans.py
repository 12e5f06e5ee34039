"""Searches among whole plans until its time is over: changes of all kinds, alone and one upon the other, judged by the
simulator.

The passes before this one follow rules about what pays. Here everything that a plan says may change, in an order that
the problem's seed decides, by four means that take turns:

* All nodes are **dealt anew** among replicas of few kinds (:mod:`.recompositions`).
* A **leap** changes what replicas are made of: stages and devices go elsewhere, replicas become one or two, degrees and
  microbatches change (:mod:`.structure_changes`). Layers and samples are divided anew with it (:mod:`.division`). Of
  many such plans those with the least estimates (:mod:`.step_estimate`) are simulated, and the best are tuned, also if
  they are a little worse.
* A **walk** makes small changes (:mod:`.replica_changes`, :mod:`.plan_changes`) one upon the other and accepts what is
  a little worse, less and less of that (threshold accepting, Dueck and Scheuer 1990), since a layer that moves together
  with a recomputation can help where neither alone does. Where memory is short, what stages keep on their devices is
  exchanged as well (:mod:`.residency_exchanges`).
* A **climb** takes every small change that helps. It tunes what leaps and walks find, and ends when many changes in a
  row did not help; the last one of all when none does. Kinds of changes that helped more often are tried first.

They start from the best plan, and in turns from the best different ones of the shortlist, or dealt anew. All of it is a
heuristic, without a bound.

A change whose step is above what would be accepted by a bound already (:mod:`hetero.cost.simulation.step_bound`) is not
simulated, and a simulation ends when it cannot be accepted any more (:mod:`hetero.cost.simulation.step_limit`). Effort
is counted in plans that are looked at, so that the same seed and limit give the same plan.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hetero.cost.memory import plan_memory
from hetero.cost.simulation.step_bound import least_step_s
from hetero.cost.simulation.step_limit import StepTooLong
from hetero.errors import ConfigError, PlanError
from hetero.plan.depths import deadlocks
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.division import DIVIDING_S, Divider
from hetero.planner.improve.gradient_sync import with_domains_of_working
from hetero.planner.improve.plan_changes import PlanChange, delay_rules, families
from hetero.planner.improve.recompositions import Recomposer
from hetero.planner.improve.replica_changes import one_layer_more_recomputed
from hetero.planner.improve.residency_exchanges import residencies
from hetero.planner.improve.step_estimate import ESTIMATING_S, StepEstimates
from hetero.planner.improve.structure_changes import structures
from hetero.planner.problem import Problem
from hetero.planner.scoring import (
    LEAST_GAIN,
    ScoredPlan,
    Shortlist,
    bytes_over_capacity,
    goal_value,
    is_better,
    memory_is_short,
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

ROUNDS_IN_VAIN = 16
"""So many walks and leaps without a better plan, one after the other, end the search. A heuristic."""

TURNS_BETWEEN_DEALING = 4
"""All nodes are dealt anew first of all, and once in so many turns. A heuristic."""

WORTH_LEAPING = 5e-3
"""Relative: a leap that gains so much is followed by others before anything is tuned. A heuristic."""

LEAPS_AT_ONCE, SIMULATED_AT_ONCE = 120, 15
"""Of so many changes of stages and replicas so many are simulated. A heuristic: estimates tell which are good."""

NOT_TUNED = 1.03
"""A plan that was divided anew may be so many times as long as one that was tuned since, to be tuned as well. A
heuristic."""

ESTIMATE = 1.05
"""An estimate may be above what is looked for by so much. A heuristic: most are within 5 %."""

DRAWN_AT_ONCE, RECOMPOSED_AT_ONCE, NEW_AT_ONCE = 160, 30, 4
"""So many plans that deal all nodes anew are drawn more, so many of all are divided, and so many simulated.
Heuristics."""

NEW_START = 1.06
"""What deals all nodes anew may be so many times as long as the best plan, to be tuned. A heuristic."""

FIRST_LOOKS = 10
"""A kind of changes that was not looked at yet counts as if one in so many helped. A heuristic."""

PATIENCE = 120
"""So many changes in vain, one after the other, end the climb from a plan that is not the best. A heuristic."""

CHANGED_SHARE = 0.3
"""Of the time of scoring a plan, for one that has most parts in common with those before. A heuristic."""

DRY_RUN_S = 2e-2
"""Seconds in which an interleaved replica is run dry, about; an estimate."""

NOT_LEGAL_SHARE, TOO_LONG_SHARE = 0.9, 0.4
"""Of these seconds, what is not spent where a plan is not legal or does not fit, and where its replay is left early.
Estimates."""

MOST_RECOMPUTED_MORE = 4
"""Layers at most that are recomputed more where a change lacks memory. A heuristic."""


def search_whole_plans(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what a search among whole plans makes of it or of another one of the shortlist."""
    return WholePlansSearch(problem).go_on(shortlist, problem, deadline)


class WholePlansSearch:
    """One search, and the best plan that it has found; it can be gone on with, also from more plans."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._dice = random.Random(problem.seed)
        self._families = list(families())
        divider = Divider(problem)
        self._structures = structures(divider)
        self._recomposer, self._estimates = Recomposer(problem, divider), StepEstimates(problem, divider)
        # The best plan and what leaps from there landed on, as far as nobody has tuned it yet.
        self._landed: list[ScoredPlan] = []
        # Of each kind of changes, how many were looked at in climbs, and how many of them helped.
        self._looks, self._gains = [0] * len(self._families), [0] * len(self._families)
        self._starts: list[ScoredPlan] = []
        self._started: set[Plan] = set()
        # Where the search is: the turn and the round that come next, the turns in vain until now, and what is left of
        # the changes of the plan that leaps begin from.
        self._turn = self._number = self._in_vain = 0
        self._leapt_from: Plan | None = None
        self._changes: list[PlanChange] = []

    def go_on(self, shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
        """The best plan, or what the search among whole plans makes of it, of another one of the shortlist, or of what
        it found before."""
        self.best, self._deadline = shortlist.best, deadline
        if deadline.is_over():
            return self.best
        # Where nothing is left to hosts, nothing is asked about it.
        if problem.offloads and residencies not in self._families and memory_is_short(self.best):
            self._families.append(residencies)
            self._looks.append(0)
            self._gains.append(0)
        for start in shortlist.starts(MOST_STARTS)[1:]:
            if start.plan not in self._started and goal_value(start, problem) < FAR * goal_value(self.best, problem):
                self._starts.append(start)
                self._started.add(start.plan)
        return self.run()

    def run(self) -> ScoredPlan:
        """Search on, where the deadline before cut the search off; anew, where it ended by itself."""
        if self._in_vain >= ROUNDS_IN_VAIN:
            self._in_vain = 0
        while not self._deadline.is_over():
            before = self.best
            if self._turn % TURNS_BETWEEN_DEALING == 0:
                self._recompose()
            self._turn += 1
            if self._in_vain >= ROUNDS_IN_VAIN:
                self._climb(self.best)
                if not (is_better(self.best, before, self._problem) or self._starts):
                    break
                self._in_vain = 0
            if self._leapt_from != self.best.plan:
                self._leapt_from, self._changes = self.best.plan, self._leaps_from(self.best)
                # To look at a change of interleaved stages takes many times as long as at another one.
                interleaved = any(replica.is_interleaved for replica in self.best.plan.replicas)
                self._landed = [] if interleaved else [self.best]
            changes, self._changes = self._changes[:LEAPS_AT_ONCE], self._changes[LEAPS_AT_ONCE:]
            self._landed += self._leaps(self.best, changes)
            self._landed.sort(key=lambda each: goal_value(each, self._problem))
            if goal_value(self.best, self._problem) > (1 - WORTH_LEAPING) * goal_value(before, self._problem):
                self._round(self._number)
                self._number += 1
            self._in_vain = 0 if is_better(self.best, before, self._problem) else self._in_vain + 1
        return self.best

    def _round(self, number: int) -> None:
        """Tune the best plan or what a leap landed on; every third time what a walk finds, and of the other rounds
        about one in five another start."""
        if number % 3 == 2 or not (self._landed or self._starts):
            found = self._walk(self.best)
        elif self._starts and (number % 5 == 1 or not self._landed):
            start = self._climb(self._starts.pop(0), PATIENCE)
            landed = self._leaps(start, self._leaps_from(start)[:LEAPS_AT_ONCE])
            found = min((start, *landed), key=lambda each: goal_value(each, self._problem))
        else:
            found = self._landed.pop(0)
        self._climb(found, PATIENCE)

    def _climb(self, current: ScoredPlan, patience: int | None = None) -> ScoredPlan:
        """Take changes that help until none does, or until so many in a row did not."""
        improved = True
        while improved:
            improved = False
            for kind, change in itertools.islice(self._in_turns(current.plan), patience):
                if self._deadline.is_over():
                    return current
                most = (1 - LEAST_GAIN) * goal_value(current, self._problem)
                found = self._changed(change, current, most)
                helps = found is not None and goal_value(found, self._problem) < most
                self._looks[kind] += 1
                self._gains[kind] += helps
                if found is not None and helps:
                    current, improved = self._noted(found), True
                    break
        return current

    def _in_turns(self, plan: Plan) -> Iterator[tuple[int, PlanChange]]:
        """All changes of ``plan`` with the number of their kind, at random; kinds that helped more often come first."""
        left = {}
        for kind, family in enumerate(self._families):
            left[kind] = list(family(plan, self._problem))
            self._dice.shuffle(left[kind])
        while left := {kind: changes for kind, changes in left.items() if changes}:
            weights = [
                len(changes) * (1 + self._gains[kind]) / (FIRST_LOOKS + self._looks[kind])
                for kind, changes in left.items()
            ]
            kind = self._dice.choices(list(left), weights)[0]
            yield kind, left[kind].pop()

    def _leaps_from(self, start: ScoredPlan) -> list[PlanChange]:
        """Changes of what the replicas of ``start`` are made of, at random."""
        changes = [change for family in self._structures for change in family(start.plan, self._problem)]
        self._dice.shuffle(changes)
        return changes

    def _leaps(self, start: ScoredPlan, changes: Sequence[PlanChange]) -> list[ScoredPlan]:
        """Plans that such changes make of ``start``: of all of them the ones with the least estimates are simulated."""
        most = NOT_TUNED * goal_value(start, self._problem)
        landed, divided, seen = [], [], {start.plan}
        for change in changes:
            if self._deadline.is_over() or not self._deadline.has(DIVIDING_S):
                break
            plan = self._made(change)
            if plan is None or plan in seen or self._least_goal(plan) > most:
                continue
            if (about := self._estimated_goal(plan)) <= ESTIMATE * most:
                divided.append((about, len(seen), plan))
            seen.add(plan)
        for _, _, plan in sorted(divided)[:SIMULATED_AT_ONCE]:
            found = self._scored(plan, most)
            if found is not None:
                landed.append(self._noted(found))
        return landed

    def _recompose(self) -> None:
        """Deal all nodes anew, some times; what is not much longer than the best plan is another start."""
        made = []
        drawn = self._recomposer.drawn(self._dice, DRAWN_AT_ONCE, RECOMPOSED_AT_ONCE)
        most = NEW_START * goal_value(self.best, self._problem)
        for number, each in enumerate(drawn):
            if self._deadline.is_over() or not self._deadline.has(each.making_s):
                break
            plan = self._made(partial(self._recomposer.plan, each))
            about = math.inf if plan is None else self._estimated_goal(plan)
            if self._problem.goal == "time":
                self._recomposer.tell(each, about)
            if plan is not None and about <= most:
                made.append((about, number, plan))
        for _, _, plan in sorted(made)[:NEW_AT_ONCE]:
            found = self._scored(plan, most, share=1.0)
            if found is not None:
                self._starts.append(self._with_delays(found))
        self._starts.sort(key=lambda each: goal_value(each, self._problem))

    def _with_delays(self, start: ScoredPlan) -> ScoredPlan:
        """The same plan, or the better one with delays of the weights' gradients by a rule."""
        found = self._noted(start)
        for change in delay_rules(start.plan, self._problem):
            most = goal_value(found, self._problem)
            split = self._changed(change, start, most)
            if split is not None and goal_value(split, self._problem) < most:
                found = self._noted(split)
        return found

    def _walk(self, start: ScoredPlan) -> ScoredPlan:
        """The best plan but ``start`` of a walk from there, or ``start`` if there is none."""
        current, best = start, None
        for step in range(WALK):
            if self._deadline.is_over():
                break
            change = self._some_change(current.plan)
            most = (1 + WORSE * (1 - step / WALK) * self._dice.random()) * goal_value(current, self._problem)
            found = self._changed(change, current, most) if change is not None else None
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

    def _made(self, change: Callable[[], Plan | None]) -> Plan | None:
        try:
            plan = change()
            return None if plan is None else with_domains_of_working(plan, self._problem)
        except (PlanError, ConfigError, ZeroDivisionError):
            return None  # A microbatch that does not divide, for instance, or a size that nobody measured.

    def _changed(self, change: PlanChange, current: ScoredPlan, most: float) -> ScoredPlan | None:
        """Score what ``change`` makes; ``None`` if that is nothing new, or as for :meth:`_scored`."""
        plan = self._made(change)
        return None if plan is None or plan == current.plan else self._scored(plan, most)

    def _scored(self, plan: Plan, most: float, share: float = CHANGED_SHARE) -> ScoredPlan | None:
        """Score ``plan``; ``None`` if it is not legal, does not fit, or is above ``most`` before all is known.

        share: of the time of scoring a plan of which nothing is known.
        """
        seconds = 0.0
        try:
            if self._least_goal(plan) > most:
                return None
            seconds = share * scoring_s(plan)
            if not self._deadline.has(seconds) or self._deadlocks(plan):
                return None
            problem, within_s = self._problem, self._step_s(plan, most)
            found = score_plan(plan, problem, within_s=within_s)
            found = found or score_with_smaller_depths(plan, problem, self._deadline, within_s=within_s)
            if found is None and (more := self._recomputing_more(plan)) is not None and more != plan:
                could_be = self._least_goal(more) <= most
                found = score_plan(more, problem, self._deadline, within_s=within_s) if could_be else None
        except (PlanError, ConfigError, ZeroDivisionError):
            found = None
        except StepTooLong:
            self._deadline.give_back(TOO_LONG_SHARE * seconds)
            return None
        if found is None:
            self._deadline.give_back(NOT_LEGAL_SHARE * seconds)
        return found

    def _deadlocks(self, plan: Plan) -> bool:
        """Whether an interleaved replica stands still; the validator would look for depths with which it does not."""
        interleaved = dict.fromkeys(replica for replica in plan.replicas if replica.is_interleaved)
        return any(self._deadline.has(DRY_RUN_S) and deadlocks(replica) for replica in interleaved)

    def _least_goal(self, plan: Plan) -> float:
        """What the goal of ``plan`` is not below; infinite where it is beyond the budget, or has no price."""
        problem = self._problem
        try:
            if problem.budget_per_hour is not None and price_per_hour(plan, problem) > problem.budget_per_hour:
                return math.inf
            least = least_step_s(plan, problem.costs)
        except (PlanError, ConfigError, ZeroDivisionError):
            return math.inf
        return least if problem.goal == "time" else least * price_per_hour(plan, problem) / 3600

    def _estimated_goal(self, plan: Plan) -> float:
        """What the goal of ``plan`` is about; infinite where there is no time left to tell."""
        if not self._deadline.has(ESTIMATING_S * sum(len(replica.stages) for replica in plan.replicas)):
            return math.inf
        try:
            about = self._estimates.step_s(plan)
        except (PlanError, ConfigError):
            return math.inf
        return about if self._problem.goal == "time" else about * price_per_hour(plan, self._problem) / 3600

    def _step_s(self, plan: Plan, goal: float) -> float:
        """The seconds of a step of ``plan`` whose goal is this one."""
        if self._problem.goal == "time":
            return goal
        return 3600 * goal / price if (price := price_per_hour(plan, self._problem)) else math.inf

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
