"""What a predicted number rests on: a measurement, or which sort of estimate, and how far off such numbers have been.

The figures of :data:`LAYER_ERRORS`, :data:`RUN_ERROR` and :data:`ORDER_ERROR` are what ``tests/bench/bench_ranges.py``
computes, and ``test_measured_errors.py`` and ``test_published_runs.py`` in ``tests/unit/cost`` hold them to it. An
error is a factor: nine of ten cases were between the prediction over it and the prediction times it. Large errors need
that: minus 60 % and plus 150 % are alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Confidence(IntEnum):
    """How far a number is measured; a sum has that of its worst summand.

    From ``EXTRAPOLATED`` on it is an estimate and is shown as one.

    EXTRAPOLATED: beyond the measured microbatch sizes of the layer itself.
    ESTIMATED: another layer, or another tp, was measured on this device.
    DATA_SHEET: nothing comparable was measured; vendors' peak figures scale what was.
    """

    MEASURED = 0
    INTERPOLATED = 1
    EXTRAPOLATED = 2
    ESTIMATED = 3
    DATA_SHEET = 4

    @property
    def is_estimate(self) -> bool:
        return self >= Confidence.EXTRAPOLATED


class LayerBasis(NamedTuple):
    """Figures that share their error: those of one device type that rest on the same sort of thing.

    One fit, one scaling by data sheets or one manner of measuring is behind all of them, so if one layer is priced too
    fast, the others are likely to be as well.
    """

    device: str
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """How far predictions of one kind have been off.

    factor: nine of ten measured values were within prediction / factor and prediction x factor.
    source: the cases.
    """

    factor: float
    source: str

    @property
    def log(self) -> float:
        """The factor as a natural logarithm, in which independent errors add up by their squares."""
        return math.log(self.factor)


LAYER_ERRORS: Mapping[Confidence, MeasuredError] = {
    Confidence.MEASURED: MeasuredError(1.0, "contained in that of whole runs, whose layers were measured"),
    Confidence.INTERPOLATED: MeasuredError(1.05, "microbatch sizes left out of the shipped profiles, between others"),
    Confidence.EXTRAPOLATED: MeasuredError(1.06, "the largest microbatch sizes left out of the shipped profiles"),
    Confidence.ESTIMATED: MeasuredError(1.15, "shipped profiles left out, estimated from other models on the device"),
    Confidence.DATA_SHEET: MeasuredError(1.17, "devices left out, scaled from another one by data sheets"),
}
"""Of forward and backward of a model's layers, by what they rest on, beside the error of whole runs."""

RUN_ERROR = MeasuredError(1.07, "the published runs whose layers were measured")
"""Of a step whose layers were measured: links, sums, order, and all that the model does not know."""

ORDER_ERROR = MeasuredError(1.08, "pairs of published runs of one model with the same devices and batch")
"""Of the ratio of two such steps, of plans for the same model, devices and batch: what they share is gone."""

STATED_LINK_ERROR = MeasuredError(
    1.5, "a heuristic: published links between nodes give messages of 16 MB 0.66 to 1.08 of what they give 1 GB"
)
"""Of a link's bandwidth that a cluster file states as one number, and not as measured over sizes of messages."""
