"""Climbs from plans by the small changes that help, each a slice of changes at a time, so that many of them share the
time: those from good plans, and those that still gain, get more of it.

How good a plan is cannot be told from what it is made of: a pipeline that was just divided by a formula may be 6 %
longer than after a climb, and another one 20 %. To climb to the end from each would leave time for few. So the climb
goes on that has the least

    goal x (1 + IN_VAIN_PRICE x changes in vain since the last one that helped),

which is a heuristic: a climb that gains nothing leaves the time to plans that are a little longer. Of plans with the
same **structure**, which is everything but layers, recomputation, samples, depths and delays, one is climbed from.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from hetero.plan.ir import Plan
from hetero.planner.improve.plan_changes import PlanChange, PlanFamily, plain_layers_by_rules
from hetero.planner.problem import Problem
from hetero.planner.scoring import LEAST_GAIN, ScoredPlan, dry_runs_s, goal_value, usual_s

Structure = tuple[tuple[tuple[str, int, int, int], ...], ...]
"""Of each replica, device, tp, dp and micro_batch_size of each stage."""

Label = tuple[int, int]
"""The kind of a change, and its number among those of a plan."""

Judge = Callable[[PlanChange, ScoredPlan, float], ScoredPlan | None]
"""Scores what a change makes of a plan; ``None`` if that is nothing, or its goal is above the number."""

IN_VAIN_PRICE = 4e-4
"""Relative: a change in vain counts as if the plan were longer by this much."""

SLICE = 40
"""Changes that a climb looks at before another one may go on. A heuristic."""

MOST_CLIMBS = 40
"""Climbs that are kept. A heuristic."""

LAST = -1
"""The kind of the changes after all others."""

FIRST_LOOKS = 10
"""A kind of changes that was not looked at yet counts as if one in so many helped. A heuristic."""


def structure_of(plan: Plan) -> Structure:
    """What replicas are made of, without layers, samples, depths and delays."""
    return tuple(
        sorted(
            tuple((stage.device, stage.tp, stage.dp, stage.micro_batch_size) for stage in replica.stages)
            for replica in plan.replicas
        )
    )


def looks_of(plan: Plan) -> int:
    """As so many a change of ``plan`` counts: to look at one of interleaved stages takes that many times as long."""
    return 1 + round(dry_runs_s(plan) / usual_s(plan))


class ChangeOrder:
    """The order in which climbs look at changes: at random, kinds that helped more often first. Where none of these
    helps, layers that move together with other depths and delays are left: many, of which few do."""

    def __init__(self, problem: Problem, families: Sequence[PlanFamily], dice: random.Random) -> None:
        self.families = list(families)
        self._problem, self._dice = problem, dice
        # Of each kind of changes, how many were looked at, and how many of them helped.
        self._looks, self._gains = [0] * len(self.families), [0] * len(self.families)

    def add(self, family: PlanFamily) -> None:
        """Another kind of changes, for plans of which nothing was listed yet."""
        self.families.append(family)
        self._looks.append(0)
        self._gains.append(0)

    def tell(self, label: Label, *, helped: bool) -> None:
        """Take notice of what came of a change."""
        if label[0] != LAST:
            self._looks[label[0]] += 1
            self._gains[label[0]] += helped

    def of(self, plan: Plan, looked: AbstractSet[Label]) -> Iterator[tuple[Label, PlanChange]]:
        """All changes of ``plan`` with their labels; before all others what was not ``looked`` at by now: of the plan
        before it did not help, and it seldom does of this one."""
        new: dict[int, list[tuple[Label, PlanChange]]] = {}
        again: dict[int, list[tuple[Label, PlanChange]]] = {}
        for kind, family in enumerate(self.families):
            for number, change in enumerate(family(plan, self._problem)):
                label = kind, number
                (again if label in looked else new).setdefault(kind, []).append((label, change))
        for left in (new, again):
            for changes in left.values():
                self._dice.shuffle(changes)
            while left:
                weights = [
                    len(changes) * (1 + self._gains[kind]) / (FIRST_LOOKS + self._looks[kind])
                    for kind, changes in left.items()
                ]
                kind = self._dice.choices(list(left), weights)[0]
                yield left[kind].pop()
                if not left[kind]:
                    del left[kind]
        last = [((LAST, number), change) for number, change in enumerate(plain_layers_by_rules(plan, self._problem))]
        self._dice.shuffle(last)
        yield from last


class Climb:
    """A climb that can be gone on with.

    current: where it is.
    in_vain: changes that were looked at since the last one that helped.
    is_over: no change of ``current`` helps.
    """

    def __init__(self, start: ScoredPlan, order: ChangeOrder, problem: Problem) -> None:
        self.current = start
        self.in_vain = 0
        self.is_over = False
        self._order, self._problem = order, problem
        self._looked: set[Label] = set()
        self._changes: Iterator[tuple[Label, PlanChange]] | None = None

    @property
    def goal(self) -> float:
        return goal_value(self.current, self._problem)

    @property
    def priority(self) -> float:
        """The least one goes on."""
        return self.goal * (1 + IN_VAIN_PRICE * self.in_vain)

    def go_on(self, judge: Judge, time_is_over: Callable[[], bool], most: int = SLICE) -> None:
        """Look at so many changes, and take those that help."""
        if self._changes is None:
            self._changes = self._order.of(self.current.plan, self._looked)
        looks = looks_of(self.current.plan)
        for _ in range(0, most, looks):
            if time_is_over():
                return
            if (drawn := next(self._changes, None)) is None:
                self.is_over = True
                return
            label, change = drawn
            self._looked.add(label)
            enough = (1 - LEAST_GAIN) * self.goal
            found = judge(change, self.current, enough)
            helps = found is not None and goal_value(found, self._problem) < enough
            self._order.tell(label, helped=helps)
            self.in_vain += looks
            if found is not None and helps:
                self.current, self.in_vain = found, 0
                self._changes = self._order.of(found.plan, self._looked)


class Climbs:
    """The climbs of a search, one of each structure, and all structures that there ever was one of."""

    def __init__(self, order: ChangeOrder, problem: Problem) -> None:
        self._order, self._problem = order, problem
        self._climbs: list[Climb] = []
        self._known: set[Structure] = set()
        self._leapt_from: set[Structure] = set()

    def knows(self, plan: Plan) -> bool:
        """Whether a climb began from a plan of this structure."""
        return structure_of(plan) in self._known

    def begun(self, start: ScoredPlan) -> Climb:
        """A new climb, which has not been added yet."""
        self._known.add(structure_of(start.plan))
        return Climb(start, self._order, self._problem)

    def add(self, climb: Climb) -> None:
        """Keep a climb; of the same structure only the one at the better plan goes on."""
        structure = structure_of(climb.current.plan)
        self._known.add(structure)
        alike = [each for each in self._climbs if structure_of(each.current.plan) == structure]
        best = min((*alike, climb), key=lambda each: each.goal)
        self._climbs = [each for each in (*self._climbs, climb) if each is best or each not in (*alike, climb)]
        if len(self._climbs) > MOST_CLIMBS:
            self._climbs.remove(max(self._climbs, key=lambda each: each.priority))

    def take(self) -> Climb | None:
        """The climb that goes on now, to be added again then; ``None`` if all are over."""
        left = [each for each in self._climbs if not each.is_over]
        if not left:
            return None
        taken = min(left, key=lambda each: each.priority)
        self._climbs.remove(taken)
        return taken

    def of(self, plan: Plan) -> Climb | None:
        """The climb that is at ``plan``."""
        return next((each for each in self._climbs if each.current.plan == plan), None)

    def next_base(self, lead: ScoredPlan, far: float) -> ScoredPlan | None:
        """The best plan of which leaps have not begun yet, nor from another of its structure: ``lead``, or where a
        climb gains nothing by now, unless that is ``far`` times as long. From then on leaps have begun there."""
        most = far * goal_value(lead, self._problem)
        tuned = (each for each in self._climbs if each.is_over or each.in_vain >= SLICE)
        near = sorted((each for each in tuned if each.goal < most), key=lambda each: each.goal)
        for each in (lead, *(climb.current for climb in near)):
            if (structure := structure_of(each.plan)) not in self._leapt_from:
                self._leapt_from.add(structure)
                return each
        return None
