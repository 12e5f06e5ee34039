"""Keeps the emulated time of one rank, in step with the wall clock.

An operation ends at a deadline: the emulated second at which the previous one ended, or at which its input arrived,
plus its own duration. The rank sleeps until the wall clock is there. So what is late because this machine woke a
process up late does not add up, and the wall clock, which is what a measurement reads, agrees with the emulated one
as long as the real work is done before its deadline. By how much it was not is kept as lateness.
"""

import time


class EmulatedClock:
    """Tells a rank its emulated time, and sleeps until the wall clock has come as far.

    Args:
        scale: wall seconds per emulated second; ``None`` where that is chosen later, before the first emulated second.
        epoch: the ``time.monotonic()`` of emulated second 0, the same on all ranks of one machine.
    """

    def __init__(self, *, scale: float | None, epoch: float) -> None:
        self.asked_scale = scale
        self.scale = scale or 1.0
        self._epoch = epoch
        self.at_s = 0.0
        self.lateness_s = 0.0

    def wall_s(self) -> float:
        """What the wall clock shows, in emulated seconds."""
        return (time.monotonic() - self._epoch) / self.scale

    def advance(self, until_s: float) -> None:
        """Sleep until emulated second ``until_s``, if that is still to come."""
        self.at_s = max(self.at_s, until_s)
        self.sleep_until(self.at_s)
        self.lateness_s = max(self.lateness_s, self.wall_s() - self.at_s)

    def sleep_until(self, until_s: float) -> None:
        """Sleep without a change of this rank's own time."""
        left = (until_s - self.wall_s()) * self.scale
        if left > 0:
            time.sleep(left)
