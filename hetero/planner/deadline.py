"""A time limit that several steps of a search share."""

import time
from dataclasses import dataclass, field
from typing import Self


@dataclass(slots=True)
class Deadline:
    """Counts from its creation; ``limit_s`` seconds later it is over.

    whole: the deadline that this one is a part of.
    left_something_out: a step that would have taken longer than was left was not begun, on this deadline or on a part.
    """

    limit_s: float
    whole: Self | None = None
    left_something_out: bool = False
    _start_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.elapsed_s)

    def is_over(self) -> bool:
        return self.elapsed_s >= self.limit_s

    def part(self, share: float) -> "Deadline":
        """A deadline of its own for ``share`` of what is left."""
        return Deadline(self.left_s * share, whole=self)

    def has(self, seconds: float) -> bool:
        """Whether so many are left for a step that cannot be interrupted; if not, the step is left out."""
        if seconds <= self.left_s:
            return True
        deadline: Deadline | None = self
        while deadline is not None:
            deadline.left_something_out = True
            deadline = deadline.whole
        return False
