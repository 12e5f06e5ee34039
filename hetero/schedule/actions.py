"""The instructions of a pipeline schedule, and the text form they print and parse as.

``2F0`` is the forward of microbatch 0 on stage 2; ``1SEND_B3`` sends slice 3 of the gradient across the boundary
before stage 1. A schedule is one row of actions per stage of a replica, in the order in which that stage runs them.
Nothing here knows tensors, time or processes; the runtime executes these rows and the simulator replays them.

Each stage counts its own microbatches. What crosses a boundary is counted in slices: the smaller of the two
microbatches, so that one microbatch of the coarser stage is several slices.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from hetero.errors import ScheduleError


class Kind(StrEnum):
    """F, B and W compute; a SEND starts a transfer; a RECV posts one, and the compute that needs it waits for it.

    Where a stage has W, its B computes the gradient of the input alone and W that of the weights; else B is both.
    """

    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.W})
RECEIVE = frozenset({Kind.RECV_F, Kind.RECV_B})


class Action(NamedTuple):
    """``number`` is a microbatch of ``stage`` for a compute, a slice of the boundary for transfers."""

    stage: int
    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as ``text``.

        Raises:
            ScheduleError: ``text`` is no action.
        """
        match = re.fullmatch(r"(\d+)(F|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)", text)
        if match is None:
            raise ScheduleError(f"not an action: {text!r}, expected e.g. 2F0 or 1SEND_B3")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


Row = list[Action]
Schedule = list[Row]


def parse_row(text: str) -> Row:
    """``"0F0 0F1 0B0"`` -> three actions."""
    return [Action.parse(word) for word in text.split()]


def parse_schedule(text: str) -> Schedule:
    """One row per line, the inverse of :func:`format_schedule`."""
    return [parse_row(line) for line in text.splitlines() if line.strip()]


def format_schedule(schedule: Schedule) -> str:
    """One line per stage."""
    return "\n".join(" ".join(map(str, row)) for row in schedule)


class Boundary(NamedTuple):
    """How the microbatches of two neighbouring stages meet: ``num_slices`` is the larger of their two counts."""

    num_slices: int
    microbatches_before: int
    microbatches_after: int

    @classmethod
    def between(cls, before: int, after: int) -> "Boundary":
        """The boundary between stages that count ``before`` and ``after`` microbatches of the same samples.

        Raises:
            ScheduleError: neither count is a multiple of the other.
        """
        large, small = max(before, after), min(before, after)
        if large % small:
            raise ScheduleError(f"stages count {before} and {after} microbatches; one must be a multiple of the other")
        return cls(large, before, after)

    def slices_before(self, microbatch: int) -> range:
        """The slices that make up ``microbatch`` of the stage before the boundary."""
        per = self.num_slices // self.microbatches_before
        return range(microbatch * per, (microbatch + 1) * per)

    def slices_after(self, microbatch: int) -> range:
        """The slices that make up ``microbatch`` of the stage after the boundary."""
        per = self.num_slices // self.microbatches_after
        return range(microbatch * per, (microbatch + 1) * per)

    def microbatch_before(self, slice_number: int) -> int:
        """The microbatch of the stage before the boundary that ``slice_number`` is a part of."""
        return slice_number * self.microbatches_before // self.num_slices

    def microbatch_after(self, slice_number: int) -> int:
        """The microbatch of the stage after the boundary that ``slice_number`` is a part of."""
        return slice_number * self.microbatches_after // self.num_slices


def boundaries(num_microbatches: Sequence[int]) -> list[Boundary]:
    """The boundary after each stage but the last."""
    return [Boundary.between(before, after) for before, after in pairwise(num_microbatches)]
