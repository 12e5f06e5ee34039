"""The event log of a node: one JSON object per line, with the seconds since the last change was noticed.

Of a recovery it has, in this order: ``detected`` (the loss), ``ranks_gone``, on the leader ``inventories``, ``plan``
and ``epoch_made``, then ``forked``, and as soon as all ranks of the node have said so ``joined``, ``built``,
``restored``, ``first_step`` and ``committed``. Between two changes there is ``progress`` now and then, and on the
leader ``straggler`` when a node counts as slower, or as fast again.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
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
    "waiting",
    "finished",
]
"""What can happen to a node, from the start of its agent to its end."""


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
    detail: str = ""


class EventLog:
    """Writes the events of one node to the end of a file."""

    def __init__(self, path: Path, *, node: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._node = node
        self._change_s = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

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
        """Write an event that happened now."""
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
        self._file.write(json.dumps(dataclasses.asdict(event)) + "\n")
        return event


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
