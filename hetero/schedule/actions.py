"""Defines the actions of a pipeline schedule, and the text form in which they print and parse.

``2F0`` is the forward of microbatch 0 on stage 2; ``1SEND_B3`` sends slice 3 of the gradient across the boundary
before stage 1; ``REDUCE4`` sums bucket 4. A schedule has one row, an ordered list of actions, per device group of a
replica: the ranks that hold one or more of its stages. Nothing here knows tensors, time or processes.

Each stage counts its own microbatches. What crosses a boundary is counted in slices: the smaller of the two
microbatches, so that one microbatch of the coarser stage is several slices.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hetero.errors import ScheduleError


class ActionKind(StrEnum):
    """The kinds of work that take time in a step, with the letters of ``torch.distributed.pipelining``.

    F is a forward. B is a backward; where it is in two parts, I computes the gradient of the input and W that of the
    weights. R runs a forward again whose first run kept nothing but its input. UPDATE is the optimizer's. A SEND starts
    a transfer, and a RECV posts one; the compute that needs it waits for it. REDUCE sums the gradients of a bucket over
    its holders, and GATHER brings the updated weights of a bucket to them.

    What a rank leaves to its host: OUT_G brings its summed gradients of a bucket there, HOST_UPDATE updates what it
    owns of the bucket, PREVIEW does so before the norm of the gradient is known, and IN_P brings the weights back.
    OUT_A brings what the forward of a microbatch has saved there, block by block behind it; IN_A brings it back, block
    by block in front of the backward. ADD_G brings the gradients of a microbatch there, block by block behind its
    backward, where they add up; IN_G brings such sums of a bucket back, where ranks sum them up. IN_W_F, IN_W_R and
    IN_W_B bring the weights of a stage to the device, block by block in front of a forward, of one that runs again, and
    of a backward of a microbatch. GATHER_IN brings what a rank has updated of such weights to the device, where a
    bucket is gathered, and GATHER_OUT brings what others have updated to the host.
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
    OUT_G = "OUT_G"
    PREVIEW = "PREVIEW"
    HOST_UPDATE = "HOST_UPDATE"
    IN_P = "IN_P"
    ADD_G = "ADD_G"
    IN_G = "IN_G"
    OUT_A = "OUT_A"
    IN_A = "IN_A"
    IN_W_F = "IN_W_F"
    IN_W_R = "IN_W_R"
    IN_W_B = "IN_W_B"
    GATHER_IN = "GATHER_IN"
    GATHER_OUT = "GATHER_OUT"


COMPUTE = frozenset({ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.I, ActionKind.W})
BACKWARD = frozenset({ActionKind.B, ActionKind.I})
"""Computes that produce the gradient of the stage's input, which the stage before needs."""

SEND = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVE = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})

OF_BUCKETS = (
    ActionKind.REDUCE,
    ActionKind.GATHER,
    ActionKind.IN_G,
    ActionKind.OUT_G,
    ActionKind.PREVIEW,
    ActionKind.HOST_UPDATE,
    ActionKind.IN_P,
    ActionKind.GATHER_IN,
    ActionKind.GATHER_OUT,
)
"""What is done to a bucket."""

FETCHES = {
    ActionKind.F: ActionKind.IN_W_F,
    ActionKind.R: ActionKind.IN_W_R,
    ActionKind.B: ActionKind.IN_W_B,
}
"""By the kind of a compute, what brings weights from the host for it."""

OF_MICROBATCHES = frozenset({ActionKind.OUT_A, ActionKind.IN_A, ActionKind.ADD_G, *FETCHES.values()})
"""Copies of what a microbatch has saved on a stage, of its gradients, and of weights for its computes."""

NO_STAGE = -1
"""Stands for the stage in actions of a device group as a whole: the update, and what is done to buckets."""

_OF_STAGES = "F|R|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|OUT_A|IN_A|ADD_G|IN_W_F|IN_W_R|IN_W_B"

_WORD = re.compile(rf"(?:(\d+)({_OF_STAGES})|({'|'.join(OF_BUCKETS)}))(\d+)|UPDATE")


class Action(NamedTuple):
    """One piece of work of a schedule: what is done, on which stage, to which microbatch, slice or bucket.

    stage: the stage that computes, sends, receives or copies; :data:`NO_STAGE` for the update and what is done to
        buckets.
    number: of a compute and of a copy of what a microbatch has the microbatch of ``stage``, of a transfer the slice of
        the boundary, otherwise the bucket.
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
        stage, kind, of_bucket, number = match.groups()
        if number is None:
            return UPDATE
        return (
            cls(NO_STAGE, ActionKind(of_bucket), int(number))
            if of_bucket
            else cls(int(stage), ActionKind(kind), int(number))
        )


UPDATE = Action(NO_STAGE, ActionKind.UPDATE, 0)

MOST_KEPT = 4096
"""Actions of so small numbers are kept. A heuristic: longer rows are rare, and take too much memory."""


def actions_of(stage: int, kind: ActionKind, numbers: range) -> Sequence[Action]:
    """The actions of a kind on ``stage`` with these numbers.

    They are the same objects in all rows: a planner has thousands of rows, which consist of the same actions.
    """
    if numbers.stop > MOST_KEPT:
        return [Action(stage, kind, n) for n in numbers]
    return _first_actions(stage, kind, (numbers.stop - 1).bit_length())[numbers.start : numbers.stop]


def action_of(stage: int, kind: ActionKind, number: int) -> Action:
    """As :func:`actions_of`, one of them."""
    if number >= MOST_KEPT:
        return Action(stage, kind, number)
    return _first_actions(stage, kind, number.bit_length())[number]


@lru_cache(maxsize=1024)
def _first_actions(stage: int, kind: ActionKind, num_bits: int) -> Sequence[Action]:
    """Those whose numbers have so many bits at most."""
    return tuple(Action(stage, kind, n) for n in range(1 << num_bits))


Row = list[Action]
"""What the ranks of one device group do, in order."""

Schedule = list[Row]
"""One row per device group of a replica."""


def parse_row(text: str) -> Row:
    """Parses one row: ``"0F0 0F1 0B0"`` is three actions.

    Raises:
        ScheduleError: a word is no action.
    """
    return [Action.parse(word) for word in text.split()]


def parse_schedule(text: str) -> Schedule:
    """Parses a schedule of one row per line, the inverse of :func:`format_schedule`.

    Raises:
        ScheduleError: a word is no action.
    """
    return [parse_row(line) for line in text.splitlines() if line.strip()]


def format_schedule(schedule: Schedule) -> str:
    """Formats a schedule as text, one line per device group."""
    return "\n".join(" ".join(map(str, row)) for row in schedule)


class StageBoundary(NamedTuple):
    """The slices in which the activations of two neighbouring stages cross from one to the other.

    A slice is the smaller of the two stages' microbatches, so that ``num_slices`` is the larger of their two counts.
    """

    num_slices: int
    microbatches_before: int
    microbatches_after: int

    @classmethod
    def between(cls, before: int, after: int) -> "StageBoundary":
        """The boundary between two stages that cut the same samples into ``before`` and ``after`` microbatches.

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
    """The boundary after each stage but the last, from the number of microbatches of every stage."""
    return [StageBoundary.between(before, after) for before, after in pairwise(num_microbatches)]


def received_by(compute: Action, edges: Sequence[StageBoundary]) -> Sequence[Action]:
    """The RECVs of the slices that a compute needs from its neighbour; ``edges`` are those of :func:`boundaries`."""
    s, kind, m = compute
    if kind == ActionKind.F and s > 0:
        return actions_of(s, ActionKind.RECV_F, edges[s - 1].slices_after(m))
    if kind in BACKWARD and s < len(edges):
        return actions_of(s, ActionKind.RECV_B, edges[s].slices_before(m))
    return ()


def sent_by(compute: Action, edges: Sequence[StageBoundary]) -> Sequence[Action]:
    """The SENDs of the slices that a compute produces for its neighbour; ``edges`` are those of :func:`boundaries`."""
    s, kind, m = compute
    if kind == ActionKind.F and s < len(edges):
        return actions_of(s, ActionKind.SEND_F, edges[s].slices_before(m))
    if kind in BACKWARD and s > 0:
        return actions_of(s, ActionKind.SEND_B, edges[s - 1].slices_after(m))
    return ()
