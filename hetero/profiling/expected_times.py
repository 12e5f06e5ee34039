"""Expects what points of a profile will take, from those that were measured."""

import statistics
from dataclasses import dataclass, field

from hetero.profiling.points import ProfilePoint
from hetero.profiling.repetitions import LEAST


@dataclass(slots=True)
class ExpectedTimes:
    """Seconds of the points so far.

    repetition_s: by profile and sort of point, of one of relative cost 1.
    preparations_s: of each point, to build its part of the model and to compile.
    """

    repetition_s: dict[tuple[int, str, str], float] = field(default_factory=dict)
    preparations_s: list[float] = field(default_factory=list)

    def learn(self, number: int, point: ProfilePoint, *, repetition_s: float, repetitions: int, all_s: float) -> None:
        """Remember that ``point`` of a profile took ``all_s``, with ``repetitions`` of ``repetition_s``."""
        self.repetition_s[number, point.what, point.kind] = repetition_s / point.relative_cost
        self.preparations_s.append(max(0.0, all_s - (repetitions + _uncounted(point)) * repetition_s))

    @property
    def preparation_s(self) -> float:
        """The median, as the first point loads libraries, too; 0 before anything is known."""
        return statistics.median(self.preparations_s) if self.preparations_s else 0.0

    def least_s(self, number: int, point: ProfilePoint) -> float:
        """Return the least seconds of its repetitions; 0 where none of this sort was measured."""
        return (1 + LEAST) * self.repetition_s.get((number, point.what, point.kind), 0.0) * point.relative_cost

    def visit_s(self, number: int, point: ProfilePoint) -> float:
        """Return the seconds of measuring it a few times. A sort that was not measured takes the mean of the others."""
        mean_s = statistics.fmean(self.repetition_s.values()) if self.repetition_s else 0.0
        repetition_s = self.repetition_s.get((number, point.what, point.kind), mean_s) * point.relative_cost
        return self.preparation_s + (_uncounted(point) + LEAST) * repetition_s


def _uncounted(point: ProfilePoint) -> int:
    """Return how many repetitions are run that do not count: to warm up, and to weigh the memory of passes."""
    return 1 if point.what in ("update", "split") else 3
