"""The instructions of a pipeline schedule, and the text form they print and parse as.

``2F0`` is the forward of microbatch 0 on stage 2; ``1SEND_B3`` sends slice 3 of the gradient across the boundary
before stage 1; ``REDUCE4`` sums bucket 4. A schedule is one row of actions per device group of a replica, the ranks
that hold one or more of its stages, in the order in which they run them. Nothing here knows tensors, time or processes.

Each stage counts its own microbatches. What crosses a boundary is counted in slices: the smaller of the two
microbatches, so that one microbatch of the coarser stage is several slices.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from hetero.errors import ScheduleError


class ActionKind(StrEnum):
    """What takes time in a step; the letters are those of ``torch.distributed.pipelining``.

    F is a forward. B is a backward; where it is in two parts, I computes the gradient of the input and W that of the
    weights. R runs a forward again whose first run kept nothing but its input. UPDATE is the optimizer's. A SEND starts
    a transfer, and a RECV posts one; the compute that needs it waits for it. REDUCE sums the gradients of a bucket over
    its holders, and GATHER brings the updated weights of a bucket to them.
    """

    F = "F"
    R = "R"
    B = "B"
    I = "I"  # noqa: E741 - the field's letter
    W = "W"
    UPDATE = "UPDATE"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    GATHER = "GATHER"


COMPUTE = frozenset({ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.I, ActionKind.W})
BACKWARD = frozenset({ActionKind.B, ActionKind.I})
"""Backwards that give their input's gradient to the stage before."""

SEND = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVE = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})

NO_STAGE = -1
"""In place of the stage of what belongs to a device group as a whole."""

_WORD = re.compile(r"(?:(\d+)(F|R|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)|(REDUCE|GATHER))(\d+)|UPDATE")


class Action(NamedTuple):
    """``number`` is a microbatch of ``stage`` for a compute, a slice of the boundary for transfers, and for collectives
    a bucket of the plan; those and the update have no stage.
    """

    stage: int
    kind: ActionKind
    number: int

    def __str__(self) -> str:
        if self.kind == ActionKind.UPDATE:
            return "UPDATE"
        return f"{self.kind}{self.number}" if self.stage == NO_STAGE else f"{self.stage}{self.kind}{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that prints as ``text``.

        Raises:
            ScheduleError: ``text`` is no action.
        """
        match = _WORD.fullmatch(text)
        if match is None:
            raise ScheduleError(f"not an action: {text!r}, expected e.g. 2F0 or 1SEND_B3")
        stage, kind, collective, number = match.groups()
        if number is None:
            return UPDATE
        return (
            cls(NO_STAGE, ActionKind(collective), int(number))
            if collective
            else cls(int(stage), ActionKind(kind), int(number))
        )


UPDATE = Action(NO_STAGE, ActionKind.UPDATE, 0)


Row = list[Action]
Schedule = list[Row]


def parse_row(text: str) -> Row:
    """``"0F0 0F1 0B0"`` -> three actions."""
    return [Action.parse(word) for word in text.split()]


def parse_schedule(text: str) -> Schedule:
    """One row per line, the inverse of :func:`format_schedule`."""
    return [parse_row(line) for line in text.splitlines() if line.strip()]


def format_schedule(schedule: Schedule) -> str:
    """One line per device group."""
    return "\n".join(" ".join(map(str, row)) for row in schedule)


class StageBoundary(NamedTuple):
    """How the microbatches of two neighbouring stages meet: ``num_slices`` is the larger of their two counts."""

    num_slices: int
    microbatches_before: int
    microbatches_after: int

    @classmethod
    def between(cls, before: int, after: int) -> "StageBoundary":
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


def boundaries(num_microbatches: Sequence[int]) -> list[StageBoundary]:
    """The boundary after each stage but the last."""
    return [StageBoundary.between(before, after) for before, after in pairwise(num_microbatches)]


def received_by(compute: Action, edges: Sequence[StageBoundary]) -> list[Action]:
    """The receives of the slices that a compute needs."""
    s, kind, m = compute
    if kind == ActionKind.F and s > 0:
        return [Action(s, ActionKind.RECV_F, i) for i in edges[s - 1].slices_after(m)]
    if kind in BACKWARD and s < len(edges):
        return [Action(s, ActionKind.RECV_B, i) for i in edges[s].slices_before(m)]
    return []


def sent_by(compute: Action, edges: Sequence[StageBoundary]) -> list[Action]:
    """The sends of the slices that a compute makes."""
    s, kind, m = compute
    if kind == ActionKind.F and s < len(edges):
        return [Action(s, ActionKind.SEND_F, i) for i in edges[s].slices_before(m)]
    if kind in BACKWARD and s > 0:
        return [Action(s, ActionKind.SEND_B, i) for i in edges[s - 1].slices_after(m)]
    return []
