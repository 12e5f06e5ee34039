"""Says which rank stood still, when others have waited for it for too long.

A rank that stands still lives: its threads beat, but its main thread does not get on, in a dead lock, a read that
hangs, or a compute that never ends. Those that wait for it get a time-out. Then every rank says what its main thread
does, since when, and whether it waits for other ranks. The one to look at waits for no other.

This costs a step nothing: whether a thread waits is read from its stack, when the roll is called.
"""

import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

from hetero.distributed.timing import wait_for_all

_OWN_THREADS = frozenset({"threading", "concurrent.futures._base", "queue"})
"""Modules in which a thread waits for another thread of its process."""

_OWN_CODE = ("hetero.", "megatron.pretrain.")


@dataclass(slots=True)
class StepProgress:
    """Place of a rank's main thread inside what it does: an action of the program, or words; empty outside a step.

    count: changes with every place, which may have the same name as the last one.
    """

    place: object = ""
    count: int = 0

    def at(self, place: object) -> None:
        """Note that the main thread has come to ``place``."""
        self.place = place
        self.count += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Answer of a rank to the roll call.

    doing: what it does, such as ``training step 4 (1B2)``.
    unchanged_s: seconds for which that has been so.
    waits: its main thread waits for other ranks.
    line: where its main thread is, such as ``stage_runner.py:120 in backward``.
    """

    doing: str
    unchanged_s: float
    waits: bool
    line: str


def main_thread_waits() -> bool:
    """Return whether the main thread waits for other ranks, be it through another thread of this process."""
    stacks = sys._current_frames()
    stack = _frames(stacks.pop(_main_id(), None))
    if stack and stack[0].f_globals.get("__name__") in _OWN_THREADS:
        return any(_waits(_frames(frame)) for frame in stacks.values())
    return _waits(stack)


def main_thread_line() -> str:
    """Return the innermost line of the main thread, and the innermost one of this program if that is another."""
    stack = _frames(sys._current_frames().get(_main_id()))
    own = (frame for frame in stack if str(frame.f_globals.get("__name__")).startswith(_OWN_CODE))
    lines = dict.fromkeys(_line(frame) for frame in (*stack[:1], next(own, None)) if frame is not None)
    return ", called from ".join(lines)


def main_thread_stack() -> str:
    """Return the stack of the main thread, as a traceback shows it."""
    return "".join(traceback.format_stack(sys._current_frames().get(_main_id())))


def still_ranks(positions: Mapping[int, Position]) -> list[int]:
    """Return the ranks that stood still, longest first: none of them waits for another.

    Ranks that compute do not wait either. Those count that have not changed for half as long as the first one.
    """
    moving_last = sorted(
        (rank for rank, position in positions.items() if not position.waits),
        key=lambda rank: -positions[rank].unchanged_s,
    )
    return [rank for rank in moving_last if positions[rank].unchanged_s >= positions[moving_last[0]].unchanged_s / 2]


def _main_id() -> int:
    return threading.main_thread().ident or 0


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a stack, innermost frame first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _waits(stack: list[FrameType]) -> bool:
    """Return whether the innermost call of ``stack`` is one that waits for other ranks."""
    if not stack or stack[0].f_globals.get("__name__") in _OWN_THREADS:
        return False
    return any(
        frame.f_code is wait_for_all.__code__ or str(frame.f_globals.get("__name__")).startswith("torch.distributed")
        for frame in stack
    )


def _line(frame: FrameType) -> str:
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
