"""Makes plans that deal all nodes anew (:mod:`.recompositions`) and keeps them until they are the best ones that nobody
has simulated.

Three steps narrow down what is looked at, each of which takes about ten times as long as the one before: of 400 that
are drawn at a time the 30 best ones are searched for a little while, of those and of what is left over the 12 best ones
to the end, and these are divided and estimated. A few of all are simulated.
"""

import math
import random
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from typing import NamedTuple

from hetero.plan.ir import Plan
from hetero.planner.deadline import Deadline
from hetero.planner.improve.recompositions import Pool, Recomposer, Recomposition

DRAWN_AT_ONCE, BEGUN_AT_ONCE, MADE_AT_ONCE = 400, 30, 12
"""So many are drawn at a time, so many searched for a little while, and so many to the end. Heuristics."""

DRAWN_PER_DEVICE = 20
"""So many are drawn at most for each device: few devices have few shapes. A heuristic."""

BEGUN_SHARE = 0.1
"""A little while is such a share of a search. A heuristic."""

Maker = Callable[[Callable[[], Plan | None]], Plan | None]
"""Makes the plan that is asked for; ``None`` if that is none."""


class DealtPlan(NamedTuple):
    """A plan with the estimate of its goal, and its number, as plans have no order."""

    about: float
    number: int
    plan: Plan


class DealtPlans:
    """Plans with their estimates that deal all nodes anew.

    Args:
        learns: what is found of a composition tells what to expect of others.
    """

    def __init__(
        self,
        recomposer: Recomposer,
        dice: random.Random,
        *,
        made: Maker,
        estimated: Callable[[Plan], float],
        learns: bool,
    ) -> None:
        self._recomposer, self._dice = recomposer, dice
        self._made, self._estimated, self._learns = made, estimated, learns
        self._plans: list[DealtPlan] = []
        self._num_made = 0

    def make_more(self, deadline: Deadline, kept: AbstractSet[int] = frozenset()) -> bool:
        """Deal all nodes anew, many times. Returns whether that made a plan that nobody had made before.

        kept: node types that a good plan does not leave idle.
        """
        before = self._num_made
        recomposer = self._recomposer
        recomposer.draw(self._dice, min(DRAWN_AT_ONCE, DRAWN_PER_DEVICE * recomposer.num_devices), deadline, kept)
        for each in self._taken(recomposer.drawn, BEGUN_AT_ONCE, deadline, self._beginning_s):
            recomposer.begin(each, self._dice, BEGUN_SHARE)
        for each in self._taken(recomposer.begun, MADE_AT_ONCE, deadline, self._making_s):
            self._make(each)
        return self._num_made > before

    def take(self, most: float) -> DealtPlan | None:
        """The plan with the least estimate, which is no longer kept; ``None`` if all are above ``most``."""
        if not self._plans:
            return None
        least = min(self._plans)
        if least.about > most:
            return None
        self._plans.remove(least)
        return least

    def put_back(self, dealt: DealtPlan) -> None:
        """Keep a plan again for which there was no time."""
        self._plans.append(dealt)

    def _taken(
        self, pool: Pool, most: int, deadline: Deadline, seconds: Callable[[Recomposition], float]
    ) -> Iterator[Recomposition]:
        """So many of a pool that could be the shortest, as long as there is time for what is done with them."""
        left = self._recomposer.taken(pool, most)
        while left and not deadline.is_over() and deadline.has(seconds(left[0])):
            yield left.pop(0)
        pool.put_back(left)

    def _beginning_s(self, drawn: Recomposition) -> float:
        return self._recomposer.shaping_s(drawn, BEGUN_SHARE)

    def _making_s(self, begun: Recomposition) -> float:
        return self._recomposer.shaping_s(begun, 1.0) + begun.making_s

    def _make(self, begun: Recomposition) -> None:
        shaped = self._recomposer.shaped(begun, self._dice)
        if shaped is None:
            return
        plan = self._made(partial(self._recomposer.plan, shaped))
        about = math.inf if plan is None else self._estimated(plan)
        if self._learns:
            self._recomposer.tell(shaped, about)
        if plan is not None and about < math.inf:
            self._num_made += 1
            self._plans.append(DealtPlan(about, self._num_made, plan))
