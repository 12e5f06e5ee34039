"""Fixes when transfers and collectives of emulated ranks start, in one memory-mapped file that all of them share.

The links of a cluster are shared by processes which nothing else connects. So each of them writes here when it has
come to a transfer or a collective, and whoever is last decides when it starts: as soon as all are there and all
wires that it takes are free, first come first served.
"""

import fcntl
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

POLL_S = 2e-4
"""Wall seconds between two looks at a meeting that not all have come to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupation:
    """What something takes from start to end.

    seconds: until it is done.
    wires: which wires it keeps busy, and for how long each.
    """

    seconds: float
    wires: tuple[tuple[Hashable, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Appointment:
    """When a meeting starts and ends, in emulated seconds."""

    start_s: float
    end_s: float


_FIELDS = 8
_ROUND, _COUNT, _READY, _START, _END = range(5)


class SharedTimetable:
    """Lets ranks wait for one another at named meetings, and gives each the same start and end of them.

    Args:
        path: of a file that is there and empty; every rank opens it.
        meetings: the number of parties by name, the same mapping on all ranks.
        wires: names of all wires, likewise.
    """

    def __init__(self, path: Path, *, meetings: Mapping[Hashable, int], wires: Sequence[Hashable]) -> None:
        self._file = path.open("r+b")
        self._parties = list(meetings.values())
        self._meeting = {name: i for i, name in enumerate(meetings)}
        self._wire = {name: i for i, name in enumerate(wires)}
        rows = len(self._wire) + 2 * len(self._meeting)
        size = rows * _FIELDS
        # Ranks that come first make the file as long as it has to be; its bytes are 0.
        self._file.truncate(max(path.stat().st_size, size * 8))
        table = np.memmap(self._file, dtype=np.float64, mode="r+", shape=(rows, _FIELDS))
        self._free_s = table[: len(self._wire), 0]
        self._slots = table[len(self._wire) :].reshape(len(self._meeting), 2, _FIELDS)

    def come(self, name: Hashable, number: int, *, ready_s: float, takes: Occupation) -> None:
        """This rank has come to the meeting ``name`` for the ``number``-th time, counted from 1.

        The last to come fixes its start. No rank comes to a meeting again before all have come to it the last time.
        """
        i = self._meeting[name]
        slot = self._slots[i, number % 2]
        with self._locked():
            if slot[_ROUND] != number:
                slot[:] = (number, 0, -math.inf, 0, 0, 0, 0, 0)
            assert slot[_COUNT] < self._parties[i], f"more than {self._parties[i]} came to {name}"
            slot[_READY] = max(slot[_READY], ready_s)
            if slot[_COUNT] + 1 == self._parties[i]:
                start_s = max([slot[_READY], *(self._free_s[self._wire[wire]] for wire, _ in takes.wires)])
                for wire, busy_s in takes.wires:
                    self._free_s[self._wire[wire]] = start_s + busy_s
                slot[_START], slot[_END] = start_s, start_s + takes.seconds
            slot[_COUNT] += 1

    def appointment(self, name: Hashable, number: int) -> Appointment:
        """When the meeting takes place; waits until all have come."""
        i = self._meeting[name]
        slot = self._slots[i, number % 2]
        while True:
            with self._locked():
                if slot[_ROUND] == number and slot[_COUNT] == self._parties[i]:
                    return Appointment(float(slot[_START]), float(slot[_END]))
            time.sleep(POLL_S)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
