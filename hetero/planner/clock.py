"""A time limit that several steps of a search share."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Counts from its creation; ``limit_s`` seconds later it is over."""

    limit_s: float
    _start_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.elapsed_s)

    def is_over(self) -> bool:
        return self.elapsed_s >= self.limit_s

    def part(self, share: float) -> "Clock":
        """A clock of its own for ``share`` of what is left."""
        return Clock(self.left_s * share)
