"""Lets the ranks of a save wait for one another for as long as each of them gets on.

A rank may write for much longer than another one, and longer than a collective may take: that is no standstill. So the
work of each rank runs in a thread, and meanwhile all ranks meet at intervals, in a collective that is over at once
when all have come. The work has stalled when neither bytes nor steps of it have moved for the time limit.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from hetero.errors import ConfigError
from hetero.serialization import read_text

T = TypeVar("T")
Advance = Callable[[], None]
"""Called by work when a step of it is done."""

_MEETINGS_PER_LIMIT = 4
_LOOK_S = 1.0
"""Seconds between two looks at the bytes of a thread."""


class StalledError(Exception):
    """Work of this rank that has not moved for the time limit. It may go on in its thread."""


def work_together(work: Callable[[Advance], T], *, group: dist.ProcessGroup, limit_s: float) -> T:
    """Do the work of this rank, and return its result when the work of all ranks of ``group`` is over.

    Collective over ``group``: an all-reduce at the end, and one for every quarter of ``limit_s`` before. What ``work``
    raises is raised then, too.

    Raises:
        StalledError: the work has not moved for ``limit_s`` seconds.
    """
    thread = _WorkThread(work, limit_s=limit_s)
    while True:
        is_over = thread.wait(limit_s / _MEETINGS_PER_LIMIT)
        num_busy = torch.tensor([0 if is_over else 1])
        dist.all_reduce(num_busy, group=group)
        if not num_busy.item():
            return thread.result()


class _WorkThread(Generic[T]):
    """Runs work in a daemon thread, and knows whether it moves."""

    def __init__(self, work: Callable[[Advance], T], *, limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s
        self._steps = 0
        self._seen = (0, "")
        self._seen_at_s = time.monotonic()
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="save-work", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the work, for some seconds at most; return whether it is over or has stalled."""
        deadline = time.monotonic() + seconds
        while not self._over.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            if self._has_stalled():
                return True
            if time.monotonic() >= deadline:
                return False
        return True

    def result(self) -> T:
        """Return what the work returned, or raise what it raised."""
        if not self._over.is_set():
            raise StalledError
        if self._error is not None:
            raise self._error
        return self._values[0]

    def _run(self) -> None:
        try:
            self._values.append(self._work(self._advance))
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            self._error = error
        self._over.set()

    def _advance(self) -> None:
        self._steps += 1

    def _has_stalled(self) -> bool:
        seen = (self._steps, _bytes_moved(self._thread.native_id))
        if seen != self._seen:
            self._seen, self._seen_at_s = seen, time.monotonic()
        return time.monotonic() - self._seen_at_s > self._limit_s


def _bytes_moved(thread_id: int | None) -> str:
    """Return the kernel's counts of what a thread has read and written, empty where it keeps none."""
    try:
        return read_text(Path(f"/proc/self/task/{thread_id}/io"))
    except ConfigError:
        return ""
