"""What a predicted number rests on: a measurement, or which sort of estimate."""

from enum import IntEnum


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
