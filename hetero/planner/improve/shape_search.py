"""Looks for the shape with which a pipeline is the shortest by its estimate: random changes, one upon the other, of
which what is a little longer is accepted, less and less of that (threshold accepting, Dueck and Scheuer 1990)."""

import random
from typing import NamedTuple

from hetero.planner.improve.compositions import EqualPipelines, RanksOfCopies
from hetero.planner.improve.division import ReplicaSteps
from hetero.planner.improve.replica_shapes import ReplicaShape, ShapeDice
from hetero.planner.improve.shape_estimates import ShapeEstimates, ShapeTimes

CHANGES_PER_DEVICE, MOST_CHANGES = 40, 800
"""Changes that a search tries for each device of a pipeline, and at most. Heuristics."""

WORSE = 0.03
"""By how much longer than before a pipeline may become at first. A heuristic."""

SHAPING_S = 3e-5
"""Seconds of trying a change, about, for the count of work; an estimate."""

LEAST_CHANGES = 40
"""Changes that a short search tries at least. A heuristic."""


class EstimatedShape(NamedTuple):
    """A shape, with what its samples take."""

    shape: ReplicaShape
    steps: ReplicaSteps

    def seconds(self, samples: float) -> float:
        """Of a step with so many samples."""
        return self.steps.fill_s + samples * self.steps.period_s


class FoundShapes(NamedTuple):
    """What a search finds.

    best: the shortest shape.
    new: the shortest of those of which no plan was made; ``None`` if there is none.
    """

    best: EstimatedShape
    new: EstimatedShape | None


class ShapeSearch:
    """Searches for shapes of the pipelines ``copies``, which are ``placed``.

    made: shapes that are in plans by now.
    """

    def __init__(self, times: ShapeTimes, copies: EqualPipelines, placed: RanksOfCopies) -> None:
        self._problem, self._copies = times.problem, copies
        self._estimates = ShapeEstimates(times, placed)
        self.made: set[ReplicaShape] = set()
        self.changes = min(MOST_CHANGES, CHANGES_PER_DEVICE * sum(each.devices * each.parts for each in copies.pieces))

    def steps(self, shape: ReplicaShape, samples: float) -> ReplicaSteps | None:
        """What so many samples take on each copy; ``None`` if nothing fits."""
        return self._estimates.steps(shape, samples)

    def shortest(
        self, start: ReplicaShape, samples: float, dice: random.Random, *, share: float = 1.0
    ) -> FoundShapes | None:
        """The shortest shapes that changes of ``start`` lead to, where each copy has so many samples; ``None`` if
        nothing fits.

        share: of the changes that are tried.
        """
        most = max(LEAST_CHANGES, int(share * self.changes))
        shapes = ShapeDice(self._problem, self._copies, dice)
        best = self._estimated(start, samples) or self._first_that_fits(start, samples, shapes)
        if best is None:
            return None
        new = None if best.shape in self.made else best
        shape, step_s = best.shape, best.seconds(samples)
        for i in range(most):
            changed = shapes.changed(shape)
            found = None if changed is None or changed == shape else self._estimated(changed, samples)
            if found is None:
                continue
            changed_s = found.seconds(samples)
            if changed_s <= step_s * (1 + WORSE * (1 - i / most) * dice.random()):
                shape, step_s = found.shape, changed_s
            if changed_s < best.seconds(samples):
                best = found
            if (new is None or changed_s < new.seconds(samples)) and found.shape not in self.made:
                new = found
        return FoundShapes(best, new)

    def _estimated(self, shape: ReplicaShape, samples: float) -> EstimatedShape | None:
        steps = self._estimates.steps(shape, samples)
        return None if steps is None else EstimatedShape(shape, steps)

    def _first_that_fits(self, shape: ReplicaShape, samples: float, shapes: ShapeDice) -> EstimatedShape | None:
        """From what does not fit every way may lead out."""
        for _ in range(MOST_CHANGES):
            shape = shapes.changed(shape) or shape
            if (found := self._estimated(shape, samples)) is not None:
                return found
        return None
