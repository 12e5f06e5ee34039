"""The event log of a node: one JSON object per line, with the seconds since the last change was noticed.

Of a recovery it has, in this order: ``detected`` (the loss), ``ranks_gone``, on the leader ``inventories``, ``plan``
and ``epoch_made``, then ``forked``, and as soon as all ranks of the node have said so ``joined``, ``built``,
``restored``, ``first_step`` and ``committed``. Between two changes there is ``progress`` now and then, and on the
leader ``straggler`` when a node counts as slower, or as fast again. Events that could not be written are counted by
``events_lost``, the first event after them.
"""

import contextlib
import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.printable_fields import AnyText
from hetero.private_files import open_for_writing
from hetero.serialization import STRICT, from_json, read_text

EventKind = Literal[
    "agent_started",
    "warm",
    "node_joined",
    "leads",
    "notice",
    "detected",
    "stop_requested",
    "stopped",
    "ranks_gone",
    "inventories",
    "straggler",
    "plan",
    "epoch_made",
    "forked",
    "joined",
    "built",
    "restored",
    "first_step",
    "committed",
    "progress",
    "rank_failed",
    "bad_copy",
    "uploaded",
    "published",
    "upload_failed",
    "evicted",
    "etcd_away",
    "etcd_back",
    "unreadable_key",
    "waiting",
    "events_lost",
    "finished",
]
"""What can happen to a node, from the start of its agent to its end."""

_MAY_PASS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE})
"""What a file system answers when it is in trouble; other errors are those of a folder that was never right."""

_BLOCK_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticEvent:
    """One line of the log.

    time_s: Unix time of the node's clock.
    since_change_s: seconds since ``detected`` or ``stop_requested``, or since the agent started if neither has been.
    step: last finished or committed step, as far as the event is about one.
    committed: last step that the node's ranks know to be committed, where they have come to a step or ended.
    nodes: of the epoch, in the order of its ranks.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    time_s: float
    node: str
    kind: EventKind
    since_change_s: float
    epoch: int = 0
    step: int = 0
    committed: int = 0
    nodes: tuple[str, ...] = ()
    detail: AnyText = ""


class EventLog:
    """Writes the events of one node to the end of a file.

    A file that takes no more (a full disk, a lost server, a deleted folder) costs events and nothing else: that is said
    once, each later event tries again, and the first that is written counts the lost ones.

    Args:
        show: prints a line for people.

    Raises:
        ConfigError: there can be no such file.
    """

    def __init__(self, path: Path, *, node: str, show: Callable[[str], None]) -> None:
        self._path = path
        self._node = node
        self._show = show
        self._change_s = time.monotonic()
        self._file: FileIO | None = None
        self._problem = ""
        self._lost = 0
        try:
            self._open()
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise ConfigError(
                    f"{path}: events cannot be logged there: {error.strerror}; name another folder (--logs)"
                ) from None
            self._lose(error)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            # File servers may refuse what was written only now.
            with contextlib.suppress(OSError):
                file.close()

    def note(
        self,
        kind: EventKind,
        *,
        epoch: int = 0,
        step: int = 0,
        committed: int = 0,
        nodes: tuple[str, ...] = (),
        detail: str = "",
    ) -> ElasticEvent:
        """Write an event that happened now; one that cannot be written is dropped."""
        now_s = time.monotonic()
        if kind in ("detected", "stop_requested"):
            self._change_s = now_s
        event = ElasticEvent(
            time_s=round(time.time(), 4),
            node=self._node,
            kind=kind,
            since_change_s=round(now_s - self._change_s, 4),
            epoch=epoch,
            step=step,
            committed=committed,
            nodes=nodes,
            detail=detail,
        )
        events = [event]
        if self._lost:
            said = f"{self._lost} events could not be written: {self._problem}"
            events.insert(0, dataclasses.replace(event, kind="events_lost", step=0, committed=0, nodes=(), detail=said))
        try:
            self._append("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in events).encode())
        except OSError as error:
            self._lost += 1
            self._lose(error)
        else:
            if self._problem:
                self._show(f"hetero: {self._path}: events are logged again, {self._lost} are missing")
            self._problem, self._lost = "", 0
        return event

    def _append(self, lines: bytes) -> None:
        if self._file is None or os.fstat(self._file.fileno()).st_nlink == 0:
            self._open()
        assert self._file is not None, "opened"
        while lines:
            lines = lines[self._file.write(lines) :]

    def _open(self) -> None:
        """Open the file, made again if it was deleted, and take away a last line that was written in part."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._file = open_for_writing(self._path, "a+")
        size = file.seek(0, os.SEEK_END)
        if (whole := _size_of_whole_lines(file, size)) < size:
            file.truncate(whole)

    def _lose(self, error: OSError) -> None:
        # To be opened again: what was written in part would spoil the next line.
        self.close()
        if not self._problem:
            self._problem = error.strerror or str(error)
            self._show(
                f"hetero: {self._path}: {self._problem}: events are not logged until it can be written again; "
                "training goes on"
            )


def _size_of_whole_lines(file: FileIO, size: int) -> int:
    """Bytes of a file of ``size`` bytes up to its last line end."""
    end = size
    while end:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def read_events(path: Path) -> list[ElasticEvent]:
    """All events of a log; a last line that is not whole, as of an agent that was killed, is left out.

    Raises:
        ConfigError: a line before it is no event.
    """
    *lines, last = read_text(path).split("\n")
    events = [from_json(ElasticEvent, line, source=f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    try:
        return [*events, from_json(ElasticEvent, last, source=str(path))] if last else events
    except ConfigError:
        return events
