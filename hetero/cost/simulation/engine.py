"""A discrete-event replay of action lists: ranks that compute, transfers that take turns on the wires.

Ranks of a device group that run alike are one lane (:mod:`.lanes`), with a clock of its own. Two manners of
execution. In ours, a SEND starts and a RECV posts at once, the transfer runs as soon as both have happened and its
wires are free, and only the compute that needs a slice waits for it. In the blocking manner, sender and receiver meet
at the action and both stand still until the last byte has arrived.

Everything that takes time is a node: a compute of a lane, or a transfer of a slice between two lanes. Its end is known
as soon as it starts, so that only the ends of computes are events: they are handled in order of time, ties in the order
in which they became known, and what a compute ends is first come first served on the wires. A replay is deterministic.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from hetero.cost.network import Port, TransferCost
from hetero.errors import ScheduleError
from hetero.schedule.actions import Action, ActionKind, Row, Schedule, boundaries

NO_CAUSE = -1

_UNKNOWN = -1.0
"""In place of the end of a node that has not started."""

Slice = Mapping[tuple[int, int], TransferCost]
"""What crosses a boundary in one slice, by the lanes of sender and receiver."""


@dataclass(slots=True)
class Span:
    """One action that took time.

    stage: of the compute, or the sender's of a transfer; ``receiver`` is ``stage`` for a compute.
    cause: index of the span whose end let this one start; ``NO_CAUSE`` if it started with its lane, or had to wait for
        weights.
    lane: of the compute, or the sender's of a transfer.
    """

    replica: int
    stage: int
    receiver: int
    kind: ActionKind
    number: int
    start_s: float
    end_s: float
    cause: int
    lane: int = 0


class Hold(NamedTuple):
    """What a compute waits for beside its slices: weights that it needs from the start, and some on its way.

    start_s: it does not start before.
    end_s: nor end before.
    """

    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStart:
    """When a lane starts, and the holds of some of its computes."""

    at_s: float = 0.0
    holds: tuple[tuple[Action, Hold], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One replica as the engine needs it.

    rows: one list of actions per device group.
    backward_s, weight_s: per stage, of a B or I and of a W. An R takes as long as an F.
    forward, backward: per boundary, the different slices in that direction; slice i is as
        ``slices[i % len(slices)]``.
    lanes: per row, when each of its lanes starts; by default one that starts at 0.
    """

    rows: Schedule
    num_microbatches: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward: tuple[tuple[Slice, ...], ...]
    backward: tuple[tuple[Slice, ...], ...]
    weight_s: tuple[float, ...] = ()
    lanes: tuple[tuple[LaneStart, ...], ...] = ()


class Lane:
    """A lane and how far it has come.

    start: when it starts, and what its computes are held up by.
    computes: its actions that take time; the first of them is node ``first``, the others follow.
    seconds: per compute.
    needs: per compute, the transfers that it waits for.
    reaches: the transfers that it comes to before its first compute, and behind each.
    """

    __slots__ = (
        "clock_s",
        "computes",
        "first",
        "holds",
        "last",
        "met",
        "missing",
        "needs",
        "position",
        "reaches",
        "seconds",
        "start",
    )

    def __init__(self, start: LaneStart) -> None:
        self.start = start
        self.computes: list[Action] = []
        self.seconds: list[float] = []
        self.needs: list[tuple[int, ...]] = []
        self.reaches: list[tuple[int, ...]] = []
        self.first = 0
        self.holds: dict[int, Hold] = {}
        # So many computes have begun. The next one begins at clock_s, or later if transfers that it needs are missing;
        # last is the node whose end brought the lane here, and met counts the transfers at which it has stood still.
        self.position = 0
        self.clock_s = start.at_s
        self.missing = 0
        self.last = NO_CAUSE
        self.met = 0

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + len(self.computes))

    def node(self, action: Action) -> int:
        """The node of one of its computes; of the last ones it is found at once."""
        return next(n for n in reversed(self.nodes) if self.computes[n - self.first] == action)


class Route(NamedTuple):
    """The slices of one direction of a boundary between two lanes that are alike: every ``step``-th from ``phase`` on.

    first: the node of the first of them, the others follow.
    wires, busy_s: which they take, and for how long each.
    """

    replica: int
    stage: int
    receiver: int
    kind: ActionKind
    lane: int
    phase: int
    step: int
    first: int
    num_slices: int
    cost: TransferCost
    wires: tuple[int, ...]
    busy_s: tuple[float, ...]

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + self.num_slices)


def route_costs(pipeline: Pipeline) -> Iterator[TransferCost]:
    """The costs of the routes of a pipeline, in the order in which a replay has them."""
    for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True):
        for slices in (*forward, *backward):
            yield from slices.values()


Touched = dict[int, list[tuple[int, ...]]]
"""By lane, the transfers of each slice that it sends, or those that it receives."""


class Replay:
    """Pipelines that run side by side and share network interfaces.

    start_s, end_s, cause: of every node; ``cause`` is the node whose end let it start.
    lanes: by pipeline, row and lane.

    Args:
        free_s: from when on each interface is free; from the start on those that are not listed.

    Raises:
        ScheduleError: no lane can move, and not all are done.
    """

    def __init__(
        self, pipelines: Sequence[Pipeline], *, blocking: bool, free_s: Mapping[Port, float] | None = None
    ) -> None:
        self.start_s: list[float] = []
        self.end_s: list[float] = []
        self.cause: list[int] = []
        self.routes: list[Route] = []
        self._route_of: list[Route | None] = []
        self._ports: dict[Port, int] = {}
        self._port_free_s = free_s or {}
        self._wire_free_s: list[float] = []
        self._wire_last: list[int] = []
        self.lanes = [self._add(r, pipeline) for r, pipeline in enumerate(pipelines)]
        every = [lane for rows in self.lanes for row in rows for lane in row]
        self._come = bytearray(len(self.end_s))
        if blocking:
            self._run_blocking(every)
        else:
            self._run(every)
        if stuck := [lane for lane in every if lane.position < len(lane.computes)]:
            waiting = ", ".join(str(lane.computes[lane.position]) for lane in stuck)
            raise ScheduleError(f"the replay stands still before {waiting}")

    def spans(self) -> list[Span]:
        """Every node as a span; those of a replica's lanes and slices lie together."""
        found: list[Span | None] = [None] * len(self.end_s)
        start_s, end_s, cause = self.start_s, self.end_s, self.cause
        for r, rows in enumerate(self.lanes):
            for row in rows:
                for number, lane in enumerate(row):
                    for n, (stage, kind, microbatch) in enumerate(lane.computes, lane.first):
                        found[n] = Span(r, stage, stage, kind, microbatch, start_s[n], end_s[n], cause[n], number)
        for r, stage, receiver, kind, number, phase, step, first, count, *_ in self.routes:
            for i in range(count):
                n = first + i
                found[n] = Span(r, stage, receiver, kind, phase + i * step, start_s[n], end_s[n], cause[n], number)
        return [span for span in found if span is not None]

    def _nodes(self, count: int, route: Route | None) -> None:
        self.start_s += [0.0] * count
        self.end_s += [_UNKNOWN] * count
        self.cause += [NO_CAUSE] * count
        self._route_of += [route] * count

    def _add(self, replica: int, pipeline: Pipeline) -> list[list[Lane]]:
        """Resolve every action of ``pipeline`` to what it does."""
        edges = boundaries(pipeline.num_microbatches)
        touched: dict[ActionKind, dict[int, Touched]] = {
            ActionKind.SEND_F: {},
            ActionKind.RECV_F: {},
            ActionKind.SEND_B: {},
            ActionKind.RECV_B: {},
        }
        for b, edge in enumerate(edges):
            touched[ActionKind.SEND_F][b], touched[ActionKind.RECV_F][b + 1] = self._slices(
                replica, ActionKind.SEND_F, (b, b + 1), pipeline.forward[b], edge.num_slices
            )
            touched[ActionKind.SEND_B][b + 1], touched[ActionKind.RECV_B][b] = self._slices(
                replica, ActionKind.SEND_B, (b + 1, b), pipeline.backward[b], edge.num_slices
            )
        starts = pipeline.lanes or ((LaneStart(),),) * len(pipeline.rows)
        lanes = []
        for row, of_row in zip(pipeline.rows, starts, strict=True):
            own = [Lane(start) for start in of_row]
            for number, lane in enumerate(own):
                _resolve(lane, number, row, pipeline, touched)
                lane.first = len(self.end_s)
                self._nodes(len(lane.computes), None)
                lane.holds = {lane.computes.index(action): hold for action, hold in lane.start.holds}
            lanes.append(own)
        return lanes

    def _slices(
        self, replica: int, kind: ActionKind, ends: tuple[int, int], slices: Sequence[Slice], num_slices: int
    ) -> tuple[Touched, Touched]:
        """Every slice of one direction of a boundary between two stages, by the lanes of sender and receiver."""
        step = len(slices)
        pairs = list(dict.fromkeys(pair for each in slices for pair in each))
        wires = self._own_wires(pairs)
        sent: Touched = {pair[0]: [()] * num_slices for pair in pairs}
        received: Touched = {pair[1]: [()] * num_slices for pair in pairs}
        for phase, each in enumerate(slices):
            for pair, cost in each.items():
                first, numbers = len(self.end_s), range(phase, num_slices, step)
                of_ports = [self._port(port) for port, _ in cost.ports]
                route = Route(
                    replica,
                    *ends,
                    kind,
                    pair[0],
                    phase,
                    step,
                    first,
                    len(numbers),
                    cost,
                    (*wires[pair], *of_ports),
                    (*[cost.seconds] * len(wires[pair]), *(busy_s for _, busy_s in cost.ports)),
                )
                self._nodes(len(numbers), route)
                self.routes.append(route)
                for n, number in enumerate(numbers, first):
                    sent[pair[0]][number] += (n,)
                    received[pair[1]][number] += (n,)
        return sent, received

    def _own_wires(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        """A device sends one message after the other, and receives likewise: a wire per lane and way, or one for both
        where a lane has but one on the other side."""
        senders, receivers = defaultdict(list), defaultdict(list)
        for sender, receiver in pairs:
            senders[sender].append(receiver)
            receivers[receiver].append(sender)
        out = {lane: self._wire(0.0) for lane in senders}
        into = {lane: self._wire(0.0) for lane in receivers}
        found = {}
        for sender, receiver in pairs:
            one_receiver, one_sender = len(senders[sender]) == 1, len(receivers[receiver]) == 1
            found[sender, receiver] = [out[sender]] * (one_sender or not one_receiver)
            found[sender, receiver] += [into[receiver]] * (not one_sender)
        return found

    def _port(self, port: Port) -> int:
        if port not in self._ports:
            self._ports[port] = self._wire(self._port_free_s.get(port, 0.0))
        return self._ports[port]

    def _wire(self, free_s: float) -> int:
        self._wire_free_s.append(free_s)
        self._wire_last.append(NO_CAUSE)
        return len(self._wire_free_s) - 1

    def _run(self, lanes: Sequence[Lane]) -> None:
        """Events are the ends of computes, and the starts of lanes."""
        events = [(lane.clock_s, i, lane) for i, lane in enumerate(sorted(lanes, key=lambda lane: lane.clock_s))]
        created = len(events)
        come, end_s = self._come, self.end_s
        awaited: dict[int, Lane] = {}
        while events:
            now_s, _, lane = heappop(events)
            position = lane.position
            ready = []
            for n in lane.reaches[position]:
                if not come[n]:
                    come[n] = True
                    continue
                self._start(n, now_s, lane.last)
                waiting = awaited.pop(n, None)
                if waiting is not None:
                    waiting.missing -= 1
                    if not waiting.missing:
                        ready.append(waiting)
            if position < len(lane.computes):
                lane.clock_s = now_s
                for n in lane.needs[position]:
                    if end_s[n] < 0.0:
                        awaited[n] = lane
                        lane.missing += 1
                if not lane.missing:
                    ready.append(lane)
            for each in ready:
                created += 1
                heappush(events, (self._compute(each), created, each))

    def _run_blocking(self, lanes: Sequence[Lane]) -> None:
        """Events are the moments at which a lane may go on."""
        events = [(lane.clock_s, i, lane) for i, lane in enumerate(lanes)]
        created = len(events)
        stands: dict[int, Lane] = {}
        while events:
            now_s, _, lane = heappop(events)
            reaches = lane.reaches[lane.position]
            if lane.met < len(reaches):
                n = reaches[lane.met]
                lane.met += 1
                other = stands.pop(n, None)
                if other is None:
                    stands[n] = lane
                    continue
                self._start(n, now_s, lane.last)
                for each in self._sender_first(n, lane, other):
                    created += 1
                    each.last = n
                    heappush(events, (self.end_s[n], created, each))
            elif lane.position < len(lane.computes):
                lane.met, lane.clock_s = 0, now_s
                created += 1
                heappush(events, (self._compute(lane), created, lane))

    def _sender_first(self, n: int, one: Lane, other: Lane) -> tuple[Lane, Lane]:
        route = self._route_of[n]
        return (one, other) if route is not None and one.computes[0].stage == route.stage else (other, one)

    def _compute(self, lane: Lane) -> float:
        """Begin the next compute, all of whose transfers have started; when it ends."""
        position = lane.position
        start_s, cause = lane.clock_s, lane.last
        for n in lane.needs[position]:
            if self.end_s[n] > start_s:
                start_s, cause = self.end_s[n], n
        end_s = start_s + lane.seconds[position]
        if lane.holds and position in lane.holds:
            hold = lane.holds[position]
            if hold.start_s > start_s:
                start_s, cause = hold.start_s, NO_CAUSE
            end_s = max(start_s + lane.seconds[position], hold.end_s)
        n = lane.first + position
        self.start_s[n], self.end_s[n], self.cause[n] = start_s, end_s, cause
        lane.last = n
        lane.position = position + 1
        return end_s

    def _start(self, n: int, now_s: float, cause: int) -> None:
        """Take the wires as soon as all are free; what comes later queues up behind."""
        route = self._route_of[n]
        assert route is not None, "only transfers take wires"
        free_s, last = self._wire_free_s, self._wire_last
        start_s = now_s
        for wire in route.wires:
            if free_s[wire] > start_s:
                start_s, cause = free_s[wire], last[wire]
        for wire, busy_s in zip(route.wires, route.busy_s, strict=True):
            free_s[wire] = start_s + busy_s
            last[wire] = n
        self.start_s[n], self.end_s[n], self.cause[n] = start_s, start_s + route.cost.seconds, cause


def _resolve(
    lane: Lane, number: int, row: Row, pipeline: Pipeline, touched: Mapping[ActionKind, Mapping[int, Touched]]
) -> None:
    """Fill in what the lane of this number computes, what each compute needs, and what the lane comes to in between."""
    own = {
        kind: {stage: lanes[number] for stage, lanes in of_stages.items() if number in lanes}
        for kind, of_stages in touched.items()
    }
    counts = pipeline.num_microbatches
    stages = {action.stage for action in row}
    inputs, gradients = (
        {s: _by_microbatch(slices, counts[s]) for s, slices in own[kind].items() if s in stages}
        for kind in (ActionKind.RECV_F, ActionKind.RECV_B)
    )
    seconds: dict[ActionKind, tuple[float, ...]] = {
        ActionKind.F: pipeline.forward_s,
        ActionKind.R: pipeline.forward_s,
        ActionKind.B: pipeline.backward_s,
        ActionKind.I: pipeline.backward_s,
        ActionKind.W: pipeline.weight_s,
    }
    wanted = {ActionKind.F: inputs, ActionKind.B: gradients, ActionKind.I: gradients}
    between: list[int] = []
    for action in row:
        stage, kind, index = action
        if kind in own:
            of_stage = own[kind].get(stage)
            if of_stage is not None:
                between += of_stage[index]
            continue
        lane.reaches.append(tuple(between))
        between = []
        needed = wanted[kind].get(stage) if kind in wanted else None
        lane.computes.append(action)
        lane.seconds.append(seconds[kind][stage])
        lane.needs.append(needed[index] if needed is not None else ())
    lane.reaches.append(tuple(between))


def _by_microbatch(slices: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The transfers of each of ``count`` microbatches."""
    per = len(slices) // count
    return [tuple(chain.from_iterable(slices[m * per : (m + 1) * per])) for m in range(count)]
