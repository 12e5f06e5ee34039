"""Counts exposed communication: the time of a rank that goes to transfers which no compute hides."""

from collections.abc import Iterable

TimeInterval = tuple[float, float]
"""Start and end, in seconds of the step."""

_DIGITS = 9
"""Of a second: what is later is rounding."""


def exposed_s(computes: Iterable[TimeInterval], arrivals: Iterable[TimeInterval], *, begin_s: float = 0.0) -> float:
    """Seconds in which a rank stood still while what it waited for was on the wire.

    A compute that begins when a transfer arrives has waited for it. The part of the wait before the transfer began is
    a bubble of another making.

    Args:
        computes: of one rank from ``begin_s`` on.
        arrivals: transfers that it received.
    """
    arriving = {round(end_s, _DIGITS): start_s for start_s, end_s in arrivals}
    total_s, idle_since_s = 0.0, begin_s
    for start_s, end_s in sorted(computes):
        sent_s = arriving.get(round(start_s, _DIGITS))
        if sent_s is not None:
            total_s += max(0.0, start_s - max(sent_s, idle_since_s))
        idle_since_s = end_s
    return total_s
