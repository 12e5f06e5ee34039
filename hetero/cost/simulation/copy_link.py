"""Puts copies between a device and its host one after the other on the link that they share.

A card has one link each way, whatever goes over it: activations, gradients, weights, and what an update brings along.
"""

from bisect import bisect_right
from collections.abc import Iterable

Busy = tuple[tuple[float, float], ...]
"""Intervals in ascending order."""

KEPT = 512
"""Intervals that are remembered, the latest ones; no copy is told of that late. A heuristic."""


class CopyLink:
    """One direction of a card's link: each copy goes at full speed into the first gap that has room for it.

    Copies are told in any order, since who makes them does not know the others; whoever is told of first is not held up
    by later ones.

    Args:
        busy: intervals that are taken, in any order.
    """

    def __init__(self, busy: Iterable[tuple[float, float]] = ()) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start_s, end_s in sorted(busy):
            self.copy(start_s, end_s - start_s)

    @property
    def busy(self) -> Busy:
        """When it is taken."""
        return tuple(zip(self._starts, self._ends, strict=True))

    def copy(self, after_s: float, seconds: float) -> float:
        """When a copy is over that begins at ``after_s`` or later."""
        i = bisect_right(self._ends, after_s)
        start_s = after_s
        while i < len(self._ends) and self._starts[i] < start_s + seconds:
            start_s = self._ends[i]
            i += 1
        end_s = start_s + seconds
        if seconds > 0:
            # Neighbours become one interval.
            first = i - 1 if i > 0 and self._ends[i - 1] == start_s else i
            last = i + 1 if i < len(self._starts) and self._starts[i] == end_s else i
            self._starts[first:last] = [min([start_s, *self._starts[first:last]])]
            self._ends[first:last] = [max([end_s, *self._ends[first:last]])]
            del self._starts[:-KEPT], self._ends[:-KEPT]
        return end_s

    def moved(self, by_s: float) -> "CopyLink":
        """The same at other times, to which copies can be added that are not here."""
        return CopyLink((start_s + by_s, end_s + by_s) for start_s, end_s in self.busy)
