"""Divides planning into rungs of fixed lengths, each longer than all before it, so that more time only continues what
less time begins.

A share of the time limit would make every step of planning another one with another limit, and lead elsewhere. A share
of a rung does not: rungs end at the same seconds whatever the limit is, and the limit only cuts the course off.
"""

from collections.abc import Iterator

from hetero.planner.deadline import Deadline

FIRST_ENDS_S = (1 / 9, 1.0, 9.0, 27.0)
"""When rungs end, in seconds after planning began. A heuristic: limits of 1, 10 and 30 s end about when a rung does,
and the last rung is most of them."""

GROWTH = 4.0
"""So many times as late as the one before ends each later one; a limit of two minutes ends after one, too. A heuristic.
"""


def rungs(limit: Deadline) -> Iterator[Deadline]:
    """Rungs one after the other until ``limit`` is over; each begins where the one before was left."""
    for end_s in _ends_s():
        if limit.is_over():
            break
        if limit.elapsed_s < end_s:
            yield limit.until(end_s)


def _ends_s() -> Iterator[float]:
    yield from FIRST_ENDS_S
    end_s = FIRST_ENDS_S[-1]
    while True:
        end_s *= GROWTH
        yield end_s
