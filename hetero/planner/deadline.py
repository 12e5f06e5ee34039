"""A time limit that the steps of planning share, in seconds that pass or in seconds of counted work."""

import time
from dataclasses import dataclass, field
from typing import Protocol, Self

LOOK_S = 1e-3
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

    whole: the deadline that this one is a part of.
    left_something_out: a step that would have taken longer than was left was not begun, on this deadline or on a part.
    """

    limit_s: float
    timer: Timer = field(default_factory=WallTime)
    whole: Self | None = None
    left_something_out: bool = False
    _start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_s = self.timer.now_s()

    @property
    def elapsed_s(self) -> float:
        return self.timer.now_s() - self._start_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.elapsed_s)

    def is_over(self) -> bool:
        """Whether no time is left; looked at between two steps of work."""
        self.timer.spend(LOOK_S)
        return self.elapsed_s >= self.limit_s

    def glance(self) -> bool:
        """Whether no time is left; looked at in a loop whose rounds do next to nothing."""
        self.timer.spend(GLANCE_S)
        return self.elapsed_s >= self.limit_s

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

    def at_least(self, seconds: float) -> "Deadline":
        """A deadline of its own for all that is left, or for ``seconds`` where that is less."""
        return Deadline(max(seconds, self.left_s), self.timer, whole=self)

    def has(self, seconds: float) -> bool:
        """Whether ``seconds`` are left for a step that cannot be interrupted; if not, the step is left out.

        What has them is begun and counts as spent.
        """
        if seconds <= self.left_s:
            self.timer.spend(seconds)
            return True
        deadline: Deadline | None = self
        while deadline is not None:
            deadline.left_something_out = True
            deadline = deadline.whole
        return False

    def give_back(self, seconds: float) -> None:
        """Note that a step for which :meth:`has` counted these ``seconds`` ended before it took them."""
        self.timer.spend(-seconds)
