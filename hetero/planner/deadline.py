"""A time limit that the steps of planning share, in seconds that pass or in seconds of counted work."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, Self

LOOK_S = 3e-4
"""What lies between two looks at a deadline, about: a template that is built, a cover that is scored. A heuristic, of
which only :class:`CountedWork` takes notice."""


GLANCE_S = 2e-6
"""What lies between two looks at a deadline in a loop that only counts through what there is. A heuristic, as
``LOOK_S``."""


class OutOfTime(Exception):
    """A step was left before its end, as its deadline was over; what it knew by then is of no use."""


class Timer(Protocol):
    """What a deadline reads the time from."""

    is_deterministic: bool

    def now_s(self) -> float:
        """Seconds since some moment."""

    def spend(self, seconds: float) -> None:
        """Note that work was done which takes about ``seconds``; below 0, that so much less was done than was noted."""


class WallTime:
    """Reads the seconds that pass by themselves."""

    is_deterministic = False

    def now_s(self) -> float:
        return time.monotonic()

    def spend(self, seconds: float) -> None:
        pass


class CountedWork:
    """Counts the seconds that the work so far takes by estimate: the same on a fast machine and on a busy one.

    What counts is CP-SAT's deterministic time, the estimated seconds of simulations, and ``LOOK_S`` for everything else
    between two looks at a deadline. With it a search that a limit cuts short takes the same course every time.
    """

    is_deterministic = True

    def __init__(self) -> None:
        self._spent_s = 0.0

    def now_s(self) -> float:
        return self._spent_s

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds


@dataclass(slots=True)
class Deadline:
    """A time limit that runs from its creation: ``limit_s`` seconds later it is over.

    whole: the deadline that this one is a part of; when that is over, so is this one.
    left_something_out: a step that would have taken longer than was left was not begun, on this deadline or on a part.
    ran_out: somebody looked at this deadline or at a part when that was over, or left something out.
    """

    limit_s: float
    timer: Timer = field(default_factory=WallTime)
    whole: Self | None = None
    left_something_out: bool = False
    ran_out: bool = False
    _start_s: float = field(init=False)
    _ended: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._start_s = self.timer.now_s()

    @property
    def elapsed_s(self) -> float:
        return self.timer.now_s() - self._start_s

    @property
    def left_s(self) -> float:
        """Seconds that are left by its own limit, whatever the limit of the whole: a share of them is then the same
        however soon the whole ends."""
        return 0.0 if self._ended else max(0.0, self.limit_s - self.elapsed_s)

    @property
    def left_of_all_s(self) -> float:
        """Seconds that are left by the limits of this deadline and of all that it is a part of."""
        return min(each.left_s for each in self._with_wholes())

    @property
    def is_interrupted(self) -> bool:
        """Whether what this deadline is a part of is over before its own limit."""
        return self.left_s > 0 and self.left_of_all_s == 0

    def is_over(self) -> bool:
        """Whether no time is left; looked at between two steps of work."""
        self.timer.spend(LOOK_S)
        return self._has_run_out()

    def glance(self) -> bool:
        """Whether no time is left; looked at in a loop whose rounds do next to nothing."""
        self.timer.spend(GLANCE_S)
        return self._has_run_out()

    def check(self) -> None:
        """Leave a step that knows nothing before its end.

        Raises:
            OutOfTime: no time is left.
        """
        if self.is_over():
            raise OutOfTime

    def part(self, share: float) -> "Deadline":
        """A deadline of its own for ``share`` of what is left."""
        return Deadline(self.left_s * share, self.timer, whole=self)

    def leaving(self, seconds: float) -> "Deadline":
        """A deadline of its own that leaves ``seconds`` of this one for what comes later."""
        return Deadline(max(0.0, self.left_s - seconds), self.timer, whole=self)

    def until(self, seconds: float) -> "Deadline":
        """A deadline of its own that ends so many seconds after this one began, if this one does not end before."""
        return Deadline(max(0.0, seconds - self.elapsed_s), self.timer, whole=self)

    def at_least(self, seconds: float) -> "Deadline":
        """A deadline of its own for all that is left, or for ``seconds`` where that is less."""
        return Deadline(max(seconds, self.left_of_all_s), self.timer)

    def has(self, seconds: float) -> bool:
        """Whether ``seconds`` are left for a step that cannot be interrupted; if not, the step is left out.

        What has them is begun and counts as spent. Where this deadline has them and the whole does not, the whole is
        over: with a later end the step would have been begun, so whatever came now would belong to another course.
        """
        if seconds <= self.left_s:
            lacking = [each for each in self._with_wholes() if seconds > each.left_s]
            if not lacking:
                self.timer.spend(seconds)
                return True
            for each in lacking:
                each._ended = True
        for each in self._with_wholes():
            each.left_something_out = each.ran_out = True
        return False

    def give_back(self, seconds: float) -> None:
        """Note that a step for which :meth:`has` counted these ``seconds`` ended before it took them."""
        self.timer.spend(-seconds)

    def _with_wholes(self) -> Iterator[Self]:
        """This deadline, the one that it is a part of, and so on."""
        deadline: Self | None = self
        while deadline is not None:
            yield deadline
            deadline = deadline.whole

    def _has_run_out(self) -> bool:
        """Whether this deadline or the whole is over; one that was found to be over stays so, also if work is given
        back."""
        now_s, found = self.timer.now_s(), False
        deadline: Deadline | None = self
        while deadline is not None:
            if not deadline._ended and now_s - deadline._start_s >= deadline.limit_s:
                deadline._ended = True
            found = found or deadline._ended
            deadline = deadline.whole
        if found:
            for each in self._with_wholes():
                each.ran_out = True
        return found
