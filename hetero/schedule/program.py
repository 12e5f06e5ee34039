"""Describes all that the ranks of a device group do in a step that takes time, as actions in ordered queues.

    compute    0F0 0F1 0B0[0RECV_B0] 0B1[0RECV_B1] UPDATE[REDUCE2]
    0SEND_F    0SEND_F0[0F0] 0SEND_F1[0F1]
    0RECV_B    0RECV_B0 0RECV_B1[0F0]
    reduce     REDUCE0[0B1@5] REDUCE2[0B1@-1]
    gather     GATHER2[UPDATE]<0F0@-1 GATHER0[UPDATE]<0F0@5

A queue is ordered: its actions start one after the other. In brackets stands what has to be done before, down to a
*position* inside a compute: REDUCE0 starts when the backward 0B1 has passed layer 5 on its way down. Behind ``<``
stands what waits for a gather, and from which layer on: the forwards of the next step, as the weights come after the
update. Buckets are numbered in the one order in which all ranks launch their collectives; a rank takes part in those
that it holds.

The host of a rank issues computes and transfers in the order of :attr:`Program.host_order`: a SEND behind the compute
that made what it sends, a RECV behind the one that its queue names. Collectives run beside them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetero.errors import ScheduleError
from hetero.schedule.actions import (
    COMPUTE,
    RECEIVE,
    SEND,
    UPDATE,
    Action,
    boundaries,
    received_by,
    sent_by,
)


class Point(NamedTuple):
    """A point in a program: where an action ends, or where a compute has passed the layer at ``position``.

    position: a layer, half a layer more for its MLP, -1 for the embedding, the number of layers for the head; ``None``
        for the end of the action. A backward passes the positions downwards, a forward upwards.
    """

    action: Action
    position: float | None = None

    def __str__(self) -> str:
        return str(self.action) if self.position is None else f"{self.action}@{self.position:g}"

    @classmethod
    def parse(cls, text: str) -> "Point":
        """The point that prints as ``text``.

        Raises:
            ScheduleError: ``text`` is no point.
        """
        word, at, position = text.partition("@")
        try:
            return cls(Action.parse(word), float(position) if at else None)
        except ValueError:
            raise ScheduleError(f"not a position: {position!r} in {text!r}, expected a layer, e.g. 0B7@2.5") from None


class QueuedAction(NamedTuple):
    """An action in its queue, with what it waits for and what waits for it.

    after: what has to be done first, beside what stands before it in its queue.
    before: what waits for it, from these points on: in the training step that follows, but for activations and weights
        that come for a compute, which is of the same step.
    """

    action: Action
    after: tuple[Point, ...] = ()
    before: tuple[Point, ...] = ()

    def __str__(self) -> str:
        after = f"[{','.join(map(str, self.after))}]" if self.after else ""
        before = f"<{','.join(map(str, self.before))}" if self.before else ""
        return f"{self.action}{after}{before}"

    @classmethod
    def parse(cls, text: str) -> "QueuedAction":
        """The queued action that prints as ``text``.

        Raises:
            ScheduleError: ``text`` is none.
        """
        match = re.fullmatch(r"([^\[<]+)(?:\[([^\]]+)\])?(?:<(.+))?", text)
        if match is None:
            raise ScheduleError(
                f"not an action of a queue: {text!r}, expected e.g. 0B0[0RECV_B0] or GATHER2[UPDATE]<0F0@-1"
            )
        action, after, before = match.groups()
        return cls(Action.parse(action), _points(after), _points(before))


def _points(text: str | None) -> tuple[Point, ...]:
    return tuple(Point.parse(word) for word in text.split(",")) if text else ()


NO_REPLICA, IDLE = -1, "idle"
"""Replica and head line of the program of a rank that holds no stage."""

QUEUES_BESIDE = (
    "weights_in",
    "activations_out",
    "activations_in",
    "gradients_out",
    "gradients_in",
    "reduce",
    "copy_out",
    "host",
    "copy_in",
    "gather_in",
    "gather",
    "gather_out",
)
"""What goes on beside computes and transfers: copies of weights from the host, of activations there and back, those of
microbatches' gradients and of their sums, and what is done to buckets, in the order in which one goes through them.
Copies to and from the host have a queue each, and so have the updates there."""

Queues = Mapping[str, tuple[QueuedAction, ...]]
"""The queues by name: ``compute``, :data:`QUEUES_BESIDE`, and for the transfers of each direction of a boundary the
stage that takes part and the kind, such as ``1RECV_B``."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the ranks of one device group do in a training step; they hold ``stages`` of ``replica``."""

    replica: int
    stages: tuple[int, ...]
    queues: Queues

    @classmethod
    def of_row(
        cls,
        row: Sequence[Action],
        *,
        replica: int,
        stages: Sequence[int],
        num_microbatches: Sequence[int],
        beside: Queues | None = None,
        updates: bool = True,
    ) -> "Program":
        """Builds the program from ``row``, an ordered list of computes with their communication.

        Args:
            num_microbatches: of every stage of the replica.
            beside: the other queues by name: the collectives of any of the group's ranks, in the order of their launch,
                and what these leave to their hosts.
            updates: whether an update follows; false for an evaluation.
        """
        beside = beside or {}
        reduces = beside.get("reduce", ())
        edges = boundaries(num_microbatches)
        producer = {send: action for action in row for send in sent_by(action, edges)}
        queues: dict[str, list[QueuedAction]] = {"compute": []}
        previous: tuple[Point, ...] = ()
        for action in row:
            if action.kind in COMPUTE:
                received = received_by(action, edges)
                queues["compute"].append(QueuedAction(action, tuple(map(Point, received))))
                previous = (Point(action),)
            else:
                after = (Point(producer[action]),) if action.kind in SEND else previous
                queues.setdefault(f"{action.stage}{action.kind}", []).append(QueuedAction(action, after))
        # A queue is ordered: the last sum is done when all are, and the world agrees on the norm after that.
        if updates:
            queues["compute"].append(QueuedAction(UPDATE, (Point(reduces[-1].action),) if reduces else ()))
        queues |= {name: list(queue) for name, queue in beside.items()}
        named = {name: tuple(queues[name]) for name in sorted(queues, key=_reading_order) if queues[name]}
        return cls(replica=replica, stages=tuple(stages), queues=named)

    @cached_property
    def host_order(self) -> tuple[Action, ...]:
        """Computes and transfers in the order in which the host of a rank issues them.

        Behind each compute come the sends of what it made, and then the receives that the next computes will need.
        """
        needed = {point.action: i for i, queued in enumerate(self.queues["compute"]) for point in queued.after}
        posted: dict[Action | None, list[Action]] = defaultdict(list)
        for queue in self.queues.values():
            for queued in queue:
                if queued.action.kind in SEND | RECEIVE:
                    posted[queued.after[0].action if queued.after else None].append(queued.action)
        order: list[Action] = []
        for action in (None, *(queued.action for queued in self.queues["compute"])):
            order += [action] if action is not None else []
            order += sorted(posted[action], key=lambda each: needed.get(each, -1))
        return tuple(order)

    def __str__(self) -> str:
        """The program as text: a line that names the device group, and one per queue."""
        width = max(map(len, self.queues), default=0)
        lines = [f"{name:{width}}  {' '.join(map(str, queue))}" for name, queue in self.queues.items()]
        head = f"replica {self.replica}, stages {' '.join(map(str, self.stages))}" if self.stages else IDLE
        return "\n".join([head, *lines])


def _reading_order(queue: str) -> tuple[int, str]:
    """Sorts queues as a reader follows them: compute, sends and receives by stage, and what goes on beside them."""
    return QUEUES_BESIDE.index(queue) + 2 if queue in QUEUES_BESIDE else queue != "compute", queue


def parse_programs(text: str) -> list[Program]:
    """Parses programs that are written one below the other; empty lines and those that begin with ``#`` are skipped.

    Raises:
        ScheduleError: a line is neither the head of a program nor a queue of one.
    """
    programs: list[tuple[int, tuple[int, ...], dict[str, tuple[QueuedAction, ...]]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        head = re.fullmatch(r"replica (\d+), stages (\d+(?: \d+)*)", line)
        if line == IDLE:
            programs.append((NO_REPLICA, (), {}))
            continue
        if head is not None:
            programs.append((int(head[1]), tuple(map(int, head[2].split())), {}))
            continue
        name, *words = line.split()
        is_queue = name in ("compute", *QUEUES_BESIDE) or re.fullmatch(r"\d+(SEND|RECV)_[FB]", name)
        if not programs or not is_queue:
            raise ScheduleError(f"not a queue of a program: {line!r}, expected e.g. compute 0F0 0B0 UPDATE")
        programs[-1][2][name] = tuple(map(QueuedAction.parse, words))
    for r, stages, queues in programs:
        if stages and "compute" not in queues:
            raise ScheduleError(f"the program of replica {r}, stages {list(stages)} has no queue compute")
    return [Program(replica=r, stages=stages, queues=queues) for r, stages, queues in programs]
