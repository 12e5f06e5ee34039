"""The program of a step: everything that takes time, as actions in ordered queues of a device group.

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
    """The end of an action, or of a compute the moment at which it has done with the layers from ``position`` on.

    position: a layer, half a layer more for its MLP, -1 for the embedding, the number of layers for the head. A
        backward passes the positions downwards, a forward upwards.
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


class Step(NamedTuple):
    """An action of a queue.

    after: what has to be done first, beside what stands before it in its queue.
    before: what waits for it, from these points on, in the step that follows.
    """

    action: Action
    after: tuple[Point, ...] = ()
    before: tuple[Point, ...] = ()

    def __str__(self) -> str:
        after = f"[{','.join(map(str, self.after))}]" if self.after else ""
        before = f"<{','.join(map(str, self.before))}" if self.before else ""
        return f"{self.action}{after}{before}"

    @classmethod
    def parse(cls, text: str) -> "Step":
        """The step that prints as ``text``.

        Raises:
            ScheduleError: ``text`` is no step.
        """
        match = re.fullmatch(r"([^\[<]+)(?:\[([^\]]+)\])?(?:<(.+))?", text)
        if match is None:
            raise ScheduleError(f"not a step: {text!r}, expected e.g. 0B0[0RECV_B0] or GATHER2[UPDATE]<0F0@-1")
        action, after, before = match.groups()
        return cls(Action.parse(action), _points(after), _points(before))


def _points(text: str | None) -> tuple[Point, ...]:
    return tuple(Point.parse(word) for word in text.split(",")) if text else ()


NO_REPLICA, IDLE = -1, "idle"
"""Of the program of a rank that holds nothing."""

Queues = Mapping[str, tuple[Step, ...]]
"""By name: ``compute``, ``reduce`` and ``gather``, and the transfers of each direction of a boundary by the stage that
takes part and the kind, such as ``1RECV_B``."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the ranks of one device group do in a step; ``stages`` of ``replica`` are those that they hold."""

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
        reduces: Sequence[Step] = (),
        gathers: Sequence[Step] = (),
        updates: bool = True,
    ) -> "Program":
        """The program whose host issues ``row``, an order of computes with their communication, and then updates.

        Args:
            num_microbatches: of every stage of the replica.
            updates: false for a row that trains nothing.
            reduces, gathers: the collectives of any of the group's ranks, in the order of their launch.
        """
        edges = boundaries(num_microbatches)
        producer = {send: action for action in row for send in sent_by(action, edges)}
        queues: dict[str, list[Step]] = {"compute": []}
        previous: tuple[Point, ...] = ()
        for action in row:
            if action.kind in COMPUTE:
                received = received_by(action, edges)
                queues["compute"].append(Step(action, tuple(map(Point, received))))
                previous = (Point(action),)
            else:
                after = (Point(producer[action]),) if action.kind in SEND else previous
                queues.setdefault(f"{action.stage}{action.kind}", []).append(Step(action, after))
        # A queue is ordered: the last sum is done when all are, and the world agrees on the norm after that.
        if updates:
            queues["compute"].append(Step(UPDATE, (Point(reduces[-1].action),) if reduces else ()))
        queues |= {"reduce": list(reduces), "gather": list(gathers)}
        named = {name: tuple(queues[name]) for name in sorted(queues, key=_place) if queues[name]}
        return cls(replica=replica, stages=tuple(stages), queues=named)

    @cached_property
    def host_order(self) -> tuple[Action, ...]:
        """Computes and transfers in the order in which the host of a rank issues them.

        Behind each compute come the sends of what it made, and then the receives that the next computes will need.
        """
        needed = {point.action: i for i, step in enumerate(self.queues["compute"]) for point in step.after}
        posted: dict[Action | None, list[Action]] = defaultdict(list)
        for steps in self.queues.values():
            for step in steps:
                if step.action.kind in SEND | RECEIVE:
                    posted[step.after[0].action if step.after else None].append(step.action)
        order: list[Action] = []
        for action in (None, *(step.action for step in self.queues["compute"])):
            order += [action] if action is not None else []
            order += sorted(posted[action], key=lambda each: needed.get(each, -1))
        return tuple(order)

    def __str__(self) -> str:
        """A line that names the group, and one per queue."""
        width = max(map(len, self.queues), default=0)
        lines = [f"{name:{width}}  {' '.join(map(str, steps))}" for name, steps in self.queues.items()]
        head = f"replica {self.replica}, stages {' '.join(map(str, self.stages))}" if self.stages else IDLE
        return "\n".join([head, *lines])


def _place(queue: str) -> tuple[int, str]:
    """Queues in the order in which a reader follows them: compute, sends and receives by stage, collectives."""
    fixed = {"compute": 0, "reduce": 2, "gather": 3}
    return fixed.get(queue, 1), queue


def parse_programs(text: str) -> list[Program]:
    """Programs from their text, one after the other; empty lines and those that begin with ``#`` do not count.

    Raises:
        ScheduleError: a line is neither the head of a program nor a queue of one.
    """
    programs: list[tuple[int, tuple[int, ...], dict[str, tuple[Step, ...]]]] = []
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
        name, *steps = line.split()
        if not programs or not re.fullmatch(r"compute|reduce|gather|\d+(SEND|RECV)_[FB]", name):
            raise ScheduleError(f"not a queue of a program: {line!r}, expected e.g. compute 0F0 0B0 UPDATE")
        programs[-1][2][name] = tuple(map(Step.parse, steps))
    for r, stages, queues in programs:
        if stages and "compute" not in queues:
            raise ScheduleError(f"the program of replica {r}, stages {list(stages)} has no queue compute")
    return [Program(replica=r, stages=stages, queues=queues) for r, stages, queues in programs]
