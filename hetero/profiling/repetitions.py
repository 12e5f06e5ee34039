"""Times one call after another, each repeated as long as its share of the time lasts, and sums up its repetitions."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST = 3
"""Repetitions of each call, also where there is no time left: fewer have no quartiles."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Seconds of a call's repetitions.

    spread: between the first and the third quartile, as a part of the median.
    """

    median_s: float
    spread: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Repetitions":
        """Sum up at least two repetitions."""
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, (third - first) / median, len(seconds))


class TimeBudget:
    """Seconds for a number of calls that are to be timed: each gets an even share of what those before it have left.

    Args:
        clock: seconds that pass.
    """

    def __init__(self, seconds: float, *, num_calls: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._deadline_s = clock() + seconds
        self._num_left = num_calls

    def measure(self, call: Callable[[], None]) -> Repetitions:
        """Run ``call`` once to warm up, and then again and again for its share, but :data:`LEAST` times at least."""
        assert self._num_left > 0, "more calls than were announced"
        began_s = self._clock()
        end_s = began_s + (self._deadline_s - began_s) / self._num_left
        self._num_left -= 1
        call()
        seconds: list[float] = []
        before_s = self._clock()
        while len(seconds) < LEAST or before_s < end_s:
            call()
            now_s = self._clock()
            seconds.append(now_s - before_s)
            before_s = now_s
        return Repetitions.of(seconds)
