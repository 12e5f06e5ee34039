"""Searches among whole plans until its time is over: changes of all kinds, alone and one upon the other, judged by the
simulator.

The passes before this one follow rules about what pays. Here everything that a plan says may change, in an order that
the problem's seed decides, by four means that take turns:

* All nodes are **dealt anew** among replicas of few kinds (:mod:`.recompositions`).
* A **leap** changes what replicas are made of: stages and devices go elsewhere, replicas become one or two, degrees and
  microbatches change (:mod:`.structure_changes`), or stages are interleaved. Layers and samples are divided anew with
  it (:mod:`.division`). Of many such plans those with the least estimates (:mod:`.step_estimate`) are simulated, and
  the best are climbed from, also if they are a little worse.
* A **climb** takes every small change that helps (:mod:`.replica_changes`, :mod:`.plan_changes`). Where memory is
  short, what stages keep on their devices is exchanged as well (:mod:`.residency_exchanges`). Many climbs share the
  time (:mod:`.climbs`).
* A **walk** makes such changes one upon the other, all kinds of them or depths and delays alone, and accepts what is a
  little worse, less and less of that (threshold accepting, Dueck and Scheuer 1990), since a layer that moves together
  with a recomputation can help where neither alone does.

They start from the best plan, and from others of the shortlist. All of it is a heuristic, without a bound.

A change whose step is above what would be accepted by a bound already (:mod:`hetero.cost.simulation.step_bound`) is not
simulated, and a simulation ends when it cannot be accepted any more (:mod:`hetero.cost.simulation.step_limit`). Effort
is counted in plans that are looked at, so that the same seed and limit give the same plan.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence

from hetero.cost.simulation.step_bound import least_step_s
from hetero.cost.simulation.step_limit import StepTooLong
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.deadline import Deadline
from hetero.planner.improve.climbs import ChangeOrder, Climb, Climbs, looks_of
from hetero.planner.improve.dealt_plans import DealtPlans
from hetero.planner.improve.division import DIVIDING_S, Divider
from hetero.planner.improve.gradient_sync import with_domains_of_working
from hetero.planner.improve.interleaving import interleavings
from hetero.planner.improve.plan_changes import PlanChange, PlanFamily, families, rules, timings
from hetero.planner.improve.recompositions import Recomposer
from hetero.planner.improve.recomputing_more import recomputing_more
from hetero.planner.improve.residency_exchanges import residencies
from hetero.planner.improve.step_estimate import ESTIMATING_S
from hetero.planner.improve.structure_changes import structures
from hetero.planner.problem import Problem
from hetero.planner.scoring import (
    LEAST_GAIN,
    ScoredPlan,
    Shortlist,
    goal_per_second,
    goal_value,
    is_within_budget,
    memory_is_short,
    score_plan,
    score_with_smaller_depths,
)

MOST_STARTS = 4
"""Plans of the shortlist that are climbed from, the best one so far among them. A heuristic."""

WALK = 60
"""Changes that a walk looks at. A heuristic."""

WORSE = 0.01
"""By how much worse than before a walk accepts a plan at its beginning. A heuristic."""

FAR = 1.15
"""A plan whose goal is above so many times the best one's is no start, and leaps do not begin there. A heuristic."""

TURNS_IN_VAIN = 40
"""After so many turns without a better plan, one after the other, the search begins anew, with other dice. A
heuristic."""

TUNING_SHARE = 0.3
"""Of the time of a search such a share, the last one, is for the plan that leads alone: what begins then has no time to
become better. A heuristic."""

WALKS_IN_VAIN = 15
"""After so many walks in vain, one after the other, the plan that leads is as good as it gets. A heuristic."""

MOST_RESTARTS = 3
"""So many searches in a row that found no better plan end all of it. A heuristic: one with other dice may."""

TURNS_BETWEEN_WALKS = 3
"""A walk begins once in so many turns. A heuristic."""

SLICES = 3
"""Slices of climbs in a turn. A heuristic."""

DEALING_SHARE, NOTHING_NEW = 0.4, 3
"""Of the time such a share is for dealing all nodes anew; what was spent on it counts so many times where it made
nothing new. Heuristics."""

WORTH_LEAPING = 5e-3
"""Relative: a leap that gains so much is followed by others before anything is tuned. A heuristic."""

LEAPS_AT_ONCE, SIMULATED_AT_ONCE = 120, 15
"""Of so many changes of stages and replicas so many are simulated. A heuristic: estimates tell which are good."""

NOT_TUNED = 1.03
"""A plan that was divided anew may be so many times as long as one that was tuned since, to be tuned as well. A
heuristic."""

ESTIMATE = 1.05
"""An estimate may be above what is looked for by so much. A heuristic: most are within 5 %."""

NEW_AT_ONCE = 4
"""So many plans that deal all nodes anew are simulated at a time. A heuristic."""

WORTH_STARTING, NEW_START, NEW_CLIMB = 1.15, 1.4, 1.2
"""What deals all nodes anew may be so many times as long as the best plan by its estimate, simulated, and after a slice
of a climb, to be simulated and to be climbed on from. Heuristics: depths and delays that nobody has chosen yet make a
plan up to a third longer than its estimate, and after a climb it is a tenth above or below."""


def search_whole_plans(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what a search among whole plans makes of it or of another one of the shortlist."""
    return WholePlansSearch(problem).go_on(shortlist, problem, deadline)


class WholePlansSearch:
    """One search, and the best plan that it has found; it can be gone on with, also from more plans.

    best: of all.
    """

    best: ScoredPlan
    # The best plan since the search began anew that is not interleaved: to look at a change of interleaved stages takes
    # many times as long, and few changes have any.
    _lead: ScoredPlan

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._dice = random.Random(problem.seed)
        self._divider = Divider(problem)
        self._structures = structures(self._divider)
        self._order = ChangeOrder(problem, families(), self._dice)
        self._timings = timings()
        self._started: dict[Plan, ScoredPlan] = {}
        self._restarts_in_vain = 0
        # Of tuning: the climb, the seconds since each means gained the last time, and the walks in vain from its plan.
        self._tuning: Climb | None = None
        self._in_vain_s = {"climb": 0.0, "walk": 0.0}
        self._walks_in_vain = 0
        # Plans that are as good as small changes make them.
        self._tuned: set[Plan] = set()

    def _begin_from(self, start: ScoredPlan) -> None:
        """Nothing is known of what leads where."""
        self._dealt = DealtPlans(
            Recomposer(self._problem, self._divider),
            self._dice,
            made=self._made,
            estimated=self._estimated_goal,
            learns=self._problem.goal == "time",
        )
        self._climbs = Climbs(self._order, self._problem)
        self._lead = start
        self._climbs.add(self._climbs.begun(start))
        # Where the search is: the turn that comes next, the turns in vain until now, and what is left of the changes of
        # the plan that leaps begin from.
        self._turn = self._in_vain = 0
        # Seconds of all turns, and of dealing in them.
        self._taken_s = self._dealing_s = 0.0
        self._base: ScoredPlan | None = None
        self._led_s = math.inf
        self._changes: list[PlanChange] = []

    def go_on(self, shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
        """The best plan, or what the search among whole plans makes of it, of another one of the shortlist, or of what
        it found before."""
        self.best, self._deadline = shortlist.best, deadline
        if deadline.is_over():
            return self.best
        # Where nothing is left to hosts, nothing is asked about it.
        if problem.offloads and residencies not in self._order.families and memory_is_short(self.best):
            self._order.add(residencies)
        starts = (shortlist.best, *shortlist.starts(MOST_STARTS))
        first = next((each for each in starts if not _is_interleaved(each)), shortlist.best)
        if not self._started:
            self._begin_from(first)
        for start in (first, *starts):
            near = start is first or self._goal(start) < FAR * self._goal(self.best)
            if near and start.plan not in self._started:
                self._climbs.add(self._climbs.begun(start))
                self._started[start.plan] = start
                self._led_by(start)
        return self.run()

    def run(self) -> ScoredPlan:
        """Search on, where the deadline before cut the search off; anew, where it ended by itself."""
        if self._restarts_in_vain > MOST_RESTARTS:
            self._restarts_in_vain = 0
        while not self._deadline.is_over():
            ends = self._restarts_in_vain > MOST_RESTARTS
            is_late = self._deadline.left_s < TUNING_SHARE * self._deadline.limit_s
            if (ends or is_late) and (untuned := self._untuned()) is not None:
                if self._tune_on(untuned):
                    self._restarts_in_vain = 0
                continue
            if ends:
                break
            best_s, lead_s, begun_s = self._goal(self.best), self._lead_s, self._deadline.elapsed_s
            if self._dealing_s < DEALING_SHARE * self._taken_s:
                self._deal()
            self._turn += 1
            if self._in_vain >= TURNS_IN_VAIN:
                self._climb_to_the_end()
                if self._lead_s > (1 - LEAST_GAIN) * lead_s:
                    self._restarts_in_vain += 1
                    if self._restarts_in_vain <= MOST_RESTARTS:
                        self._begin_from(next(iter(self._started.values())))
                    continue
                self._in_vain = 0
            self._leap()
            if self._lead_s > (1 - WORTH_LEAPING) * lead_s:
                self._tune()
            self._in_vain = 0 if self._lead_s < (1 - LEAST_GAIN) * lead_s else self._in_vain + 1
            if self._goal(self.best) < (1 - LEAST_GAIN) * best_s:
                self._restarts_in_vain = 0
            self._taken_s += self._deadline.elapsed_s - begun_s
        return self.best

    def _goal(self, scored: ScoredPlan) -> float:
        return goal_value(scored, self._problem)

    @property
    def _lead_s(self) -> float:
        return self._goal(self._lead)

    def _leap(self) -> None:
        """Leap from the plan that leads; where nothing is left of its changes, from the next best one."""
        led_s, self._led_s = self._led_s, self._lead_s
        if not self._changes or self._led_s < led_s:
            base = self._climbs.next_base(self._lead, FAR)
            if base is not None:
                self._interleave(base)
                self._base, self._changes = base, self._leaps_from(base)
        if self._base is not None:
            changes, self._changes = self._changes[:LEAPS_AT_ONCE], self._changes[LEAPS_AT_ONCE:]
            for landed in self._leaps(self._base, changes):
                self._climbs.add(self._climbs.begun(landed))

    def _interleave(self, start: ScoredPlan) -> None:
        """Climb from what several stages per device group make of ``start``: before that they are seldom any good."""
        for change in interleavings(start.plan, self._problem):
            if self._deadline.is_over():
                break
            plan = self._made(change)
            if plan is not None and plan != start.plan:
                self._climb_from(plan, NEW_START * self._goal(start))

    def _tune(self) -> None:
        """Go on with the climbs whose turn it is, and now and then with a walk from the plan that leads."""
        self._climb_of(self._lead)
        if self._turn % TURNS_BETWEEN_WALKS == 0:
            kinds = self._dice.choice((self._timings, self._order.families))
            if (found := self._walk(self._lead, kinds)) is not None:
                self._climbs.add(self._climbs.begun(found))
        for _ in range(SLICES):
            if self._deadline.is_over() or (climb := self._climbs.take()) is None:
                break
            climb.go_on(self._judged, self._deadline.is_over)
            self._climbs.add(climb)

    def _untuned(self) -> ScoredPlan | None:
        """The best plan or the one that leads, if small changes may still make one of them better."""
        return next((each for each in (self.best, self._lead) if each.plan not in self._tuned), None)

    def _tune_on(self, scored: ScoredPlan) -> bool:
        """Climb on from a plan, or walk through its depths and delays: whichever has gained nothing for less time.
        Where no change helps any more, walk. Whether it gains."""
        if self._tuning is None or self._tuning.current.plan != scored.plan:
            self._tuning, self._walks_in_vain = self._climb_of(scored), 0
        climb, begun_s = self._tuning, self._deadline.elapsed_s
        walks = climb.is_over or self._in_vain_s["walk"] < self._in_vain_s["climb"]
        if walks:
            # Where climbing is over, now and then through all kinds of changes.
            all_kinds = climb.is_over and self._dice.random() < 0.5
            found = self._walk(scored, self._order.families if all_kinds else self._timings)
        else:
            climb.go_on(self._judged, self._deadline.is_over)
            found = climb.current
        means = "walk" if walks else "climb"
        gains = found is not None and self._goal(found) < self._goal(scored)
        self._in_vain_s[means] = 0.0 if gains else self._in_vain_s[means] + self._deadline.elapsed_s - begun_s
        self._walks_in_vain = 0 if gains else self._walks_in_vain + walks
        # Nothing gained for so long that another plan is more likely to.
        if self._walks_in_vain >= WALKS_IN_VAIN and climb.is_over:
            self._tuned.add(scored.plan)
        return gains

    def _climb_of(self, scored: ScoredPlan) -> Climb:
        """The climb that is at a plan; a new one, if there is none."""
        if (climb := self._climbs.of(scored.plan)) is None:
            climb = self._climbs.begun(scored)
            self._climbs.add(climb)
        return climb

    def _climb_to_the_end(self) -> None:
        """Look at all changes of the plan that leads."""
        climb = self._climb_of(self._lead)
        while not (climb.is_over or self._deadline.is_over()):
            climb.go_on(self._judged, self._deadline.is_over)

    def _judged(self, change: PlanChange, current: ScoredPlan, most: float) -> ScoredPlan | None:
        """As :meth:`_changed`, and noted if it is a better plan."""
        found = self._changed(change, current, most)
        return None if found is None else self._noted(found)

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
            if plan is None or plan in seen or self._climbs.knows(plan):
                continue
            if self._least_goal(plan) > most:
                continue
            if not self._deadline.has(ESTIMATING_S * sum(len(replica.stages) for replica in plan.replicas)):
                break
            if (about := self._estimated_goal(plan)) <= ESTIMATE * most:
                divided.append((about, len(seen), plan))
            seen.add(plan)
        for _, _, plan in sorted(divided)[:SIMULATED_AT_ONCE]:
            found = self._scored(plan, most)
            if found is not None:
                landed.append(self._noted(found))
        return landed

    def _deal(self) -> None:
        """Deal all nodes anew; what is not much longer than the best plan is another start."""
        begun_s = self._deadline.elapsed_s
        made_some = self._dealt.make_more(self._deadline, self._kept_node_types())
        for _ in range(NEW_AT_ONCE):
            dealt = None if self._deadline.is_over() else self._dealt.take(WORTH_STARTING * self._goal(self.best))
            if dealt is None:
                break
            if not self._climb_from(dealt.plan, NEW_START * self._goal(self.best)):
                self._dealt.put_back(dealt)
        taken_s = self._deadline.elapsed_s - begun_s
        self._dealing_s += taken_s if made_some else NOTHING_NEW * taken_s

    def _kept_node_types(self) -> set[int]:
        """Those that the best plan does not leave idle."""
        return {self._problem.node_type_of(stage.ranks[0]).index for _, _, stage in self.best.plan.stages()}

    def _climb_from(self, plan: Plan, most: float) -> bool:
        """Climb from a plan of another structure, if it is not above ``most``. ``False`` if there was no time to see
        whether it is."""
        if self._climbs.knows(plan):
            return True
        found = self._scored(plan, most)
        if found is None:
            return not self._deadline.left_something_out
        climb = self._climbs.begun(self._with_rules(found))
        climb.go_on(self._judged, self._deadline.is_over)
        # One that there was no time for may still become better.
        if climb.goal < NEW_CLIMB * self._lead_s or self._deadline.ran_out:
            self._climbs.add(climb)
        return True

    def _with_rules(self, start: ScoredPlan) -> ScoredPlan:
        """The same plan, or the best one with depths and delays of the weights' gradients by rules."""
        best = self._noted(start)
        for change in rules(start.plan, self._problem):
            most = goal_value(best, self._problem)
            found = self._changed(change, start, most)
            if found is not None and goal_value(found, self._problem) < most:
                best = self._noted(found)
        return best

    def _walk(self, start: ScoredPlan, kinds: Sequence[PlanFamily]) -> ScoredPlan | None:
        """The best plan but ``start`` of a walk from there by changes of these ``kinds``; ``None`` if there is none."""
        current, best = start, None
        for step in range(0, WALK, looks_of(start.plan)):
            if self._deadline.is_over():
                break
            change = self._some_change(current.plan, kinds)
            most = (1 + WORSE * (1 - step / WALK) * self._dice.random()) * goal_value(current, self._problem)
            found = self._changed(change, current, most) if change is not None else None
            if found is None or goal_value(found, self._problem) > most:
                continue
            current = self._noted(found)
            if best is None or goal_value(current, self._problem) < goal_value(best, self._problem):
                best = current
        return best

    def _some_change(self, plan: Plan, kinds: Sequence[PlanFamily]) -> PlanChange | None:
        """A random change of a random one of these kinds, or two of them, one upon the other."""
        first = self._one_of(self._dice.choice(kinds)(plan, self._problem))
        if first is None or self._dice.random() < 0.5:
            return first
        family = self._dice.choice(kinds)

        def both() -> Plan:
            changed = first()
            second = self._one_of(family(changed, self._problem))
            return changed if second is None else second()

        return both

    def _one_of(self, changes: Iterator[PlanChange]) -> PlanChange | None:
        listed = list(changes)
        return self._dice.choice(listed) if listed else None

    def _noted(self, found: ScoredPlan) -> ScoredPlan:
        if self._goal(found) < self._goal(self.best):
            self.best = found
        self._led_by(found)
        return found

    def _led_by(self, found: ScoredPlan) -> None:
        """It leads if it is better than what does, and not interleaved."""
        better = _is_interleaved(self._lead) or self._goal(found) < self._lead_s
        if better and not _is_interleaved(found):
            self._lead = found

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

    def _scored(self, plan: Plan, most: float) -> ScoredPlan | None:
        """Score ``plan``; ``None`` if it is not legal, does not fit, or is above ``most`` before all is known."""
        try:
            if self._least_goal(plan) > most:
                return None
            problem, deadline, within_s = self._problem, self._deadline, most / goal_per_second(plan, self._problem)
            found = score_plan(plan, problem, deadline, within_s=within_s)
            found = found or score_with_smaller_depths(plan, problem, deadline, within_s=within_s)
            if found is None and (more := recomputing_more(plan, problem, deadline)) is not None and more != plan:
                could_be = self._least_goal(more) <= most
                found = score_plan(more, problem, deadline, within_s=within_s) if could_be else None
        except (PlanError, ConfigError, ZeroDivisionError, StepTooLong):
            return None
        return found

    def _least_goal(self, plan: Plan) -> float:
        """What the goal of ``plan`` is not below; infinite where it is beyond the budget, or has no price."""
        problem = self._problem
        try:
            if not is_within_budget(plan, problem):
                return math.inf
            least = least_step_s(plan, problem.costs)
        except (PlanError, ConfigError, ZeroDivisionError):
            return math.inf
        return least * goal_per_second(plan, problem)

    def _estimated_goal(self, plan: Plan) -> float:
        """What the goal of ``plan`` is about; infinite where it has none."""
        try:
            about = self._divider.estimates.step_s(plan)
        except (PlanError, ConfigError):
            return math.inf
        return about * goal_per_second(plan, self._problem)


def _is_interleaved(scored: ScoredPlan) -> bool:
    return any(replica.is_interleaved for replica in scored.plan.replicas)
