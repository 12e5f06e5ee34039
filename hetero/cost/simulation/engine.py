"""A discrete-event replay of action lists: lanes that compute, transfers that take turns on the wires.

A lane is the data-parallel ranks of a device group that do the same at the same times (:mod:`.lanes`); it has a clock
of its own. A SEND starts and a RECV posts at once, the transfer runs as soon as both have happened and its wires are
free, and only the compute that needs a slice waits for it. Runtimes whose transfers block are replayed by
:mod:`.blocking_replay`.

Everything that takes time is a node: a compute of a lane, or a transfer of a slice between two lanes. Its end is known
as soon as it starts, so that only the ends of computes are events: they are handled in order of time, ties in the order
in which they became known, and what a compute ends is first come first served on the wires. A replay is deterministic.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from hetero.cost.network import Port, TransferCost
from hetero.cost.simulation.activation_copies import ActivationCopies, StageCopies
from hetero.cost.simulation.recent import Recent
from hetero.errors import ScheduleError
from hetero.schedule.actions import Action, ActionKind, Row, Schedule, StageBoundary, boundaries

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


class WeightWait(NamedTuple):
    """A compute's wait for gathered weights: those that it needs from the start, and those of its later layers.

    start_s: it does not start before.
    end_s: nor end before.
    """

    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneStart:
    """When a lane starts, which of its computes wait for weights, and what of its stages goes to the host and back."""

    at_s: float = 0.0
    copies: StageCopies = ()
    weight_waits: tuple[tuple[Action, WeightWait], ...] = ()


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


class ResolvedLane(NamedTuple):
    """What a lane does, see :class:`Lane`; ``durations`` are, per compute, which of :func:`_seconds` it takes."""

    computes: Sequence[Action]
    durations: Sequence[int]
    needs: Sequence[tuple[int, ...]]
    posts: Sequence[tuple[int, ...]]


class ResolvedRow(NamedTuple):
    """The lanes of a row, resolved, with the row that they come from."""

    row: Row
    lanes: Sequence[ResolvedLane]


class Lane:
    """A lane of a device group, and how far its replay has come.

    start: when it starts, and which of its computes wait for weights.
    computes: its actions that take time; the first of them is node ``first``, the others follow.
    seconds: per compute.
    needs: per compute, the transfers that it waits for.
    posts: the transfers that it posts, as sender or receiver, before its first compute, and behind each.
    """

    __slots__ = (
        "clock_s",
        "computes",
        "copies",
        "first",
        "last",
        "missing",
        "needs",
        "position",
        "posts",
        "seconds",
        "start",
        "weight_waits",
    )

    def __init__(self, start: LaneStart, resolved: "ResolvedLane", seconds: Sequence[float]) -> None:
        self.start = start
        self.computes = resolved.computes
        self.needs = resolved.needs
        self.posts = resolved.posts
        self.seconds = [seconds[i] for i in resolved.durations]
        self.first = 0
        self.weight_waits: dict[int, WeightWait] = {}
        self.copies: ActivationCopies | None = None
        # So many computes have begun. The next one begins at clock_s, or later if transfers that it needs are missing;
        # last is the node whose end brought the lane here.
        self.position = 0
        self.clock_s = start.at_s
        self.missing = 0
        self.last = NO_CAUSE

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + len(self.computes))

    def node(self, action: Action) -> int:
        """The node of one of its computes, looked for from the last one on."""
        return next(n for n in reversed(self.nodes) if self.computes[n - self.first] == action)


class TransferSeries(NamedTuple):
    """The transfers of one cost from one lane to another: every ``step``-th slice of a boundary, from ``phase`` on.

    lane, receiving_lane: the sender's and the receiver's.
    first: the node of the first of them, the others follow.
    wires, busy_s: which they take, and for how long each.
    """

    replica: int
    stage: int
    receiver: int
    kind: ActionKind
    lane: int
    receiving_lane: int
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


def transfer_costs(pipeline: Pipeline) -> Iterator[TransferCost]:
    """The costs of the transfers of a pipeline, in the order of a replay's ``transfers``."""
    for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True):
        for slices in (*forward, *backward):
            yield from slices.values()


SliceNodes = dict[int, list[tuple[int, ...]]]
"""By lane, the nodes of the transfers of each slice that it sends, or those that it receives."""


class Replay:
    """Runs pipelines side by side that share network interfaces.

    start_s, end_s, cause: of every node; ``cause`` is the node whose end let it start.
    lanes: by pipeline, row and lane.
    transfers: of all pipelines.

    Args:
        free_s: from when on each interface is free; from the start on those that are not listed.
        resolved: the rows of replays before: pipelines that differ in nothing but seconds have theirs in common.

    Raises:
        ScheduleError: no lane can move, and not all are done.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        *,
        free_s: Mapping[Port, float] | None = None,
        resolved: "Recent[ResolvedRow] | None" = None,
    ) -> None:
        self.start_s: list[float] = []
        self.end_s: list[float] = []
        self.cause: list[int] = []
        self.transfers: list[TransferSeries] = []
        self._series_of: list[TransferSeries | None] = []
        self._ports: dict[Port, int] = {}
        self._port_free_s = free_s or {}
        self._wire_free_s: list[float] = []
        self._wire_last: list[int] = []
        self._resolved: Recent[ResolvedRow] = Recent(0) if resolved is None else resolved
        self.lanes = [self._add(r, pipeline) for r, pipeline in enumerate(pipelines)]
        every = [lane for rows in self.lanes for row in rows for lane in row]
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
        for r, stage, receiver, kind, number, _, phase, step, first, count, *_ in self.transfers:
            for i in range(count):
                n = first + i
                found[n] = Span(r, stage, receiver, kind, phase + i * step, start_s[n], end_s[n], cause[n], number)
        return [span for span in found if span is not None]

    def _nodes(self, count: int, series: TransferSeries | None) -> None:
        self.start_s += [0.0] * count
        self.end_s += [_UNKNOWN] * count
        self.cause += [NO_CAUSE] * count
        self._series_of += [series] * count

    def _add(self, replica: int, pipeline: Pipeline) -> list[list[Lane]]:
        """Resolve every action of ``pipeline`` to what it does."""
        edges, first_node, first_series = boundaries(pipeline.num_microbatches), len(self.end_s), len(self.transfers)
        for b, edge in enumerate(edges):
            self._add_transfers(replica, ActionKind.SEND_F, (b, b + 1), pipeline.forward[b], edge.num_slices)
            self._add_transfers(replica, ActionKind.SEND_B, (b + 1, b), pipeline.backward[b], edge.num_slices)
        starts = pipeline.lanes or ((LaneStart(),),) * len(pipeline.rows)
        series = self.transfers[first_series:]
        structure = (
            first_node,
            pipeline.num_microbatches,
            tuple((each.lane, each.receiving_lane, each.phase, each.step, each.num_slices) for each in series),
        )
        slice_nodes = cache(lambda: _nodes_of_slices(edges, series))
        resolved = []
        for row, of_row in zip(pipeline.rows, starts, strict=True):
            resolve = partial(_resolve_row, len(of_row), row, pipeline.num_microbatches, slice_nodes)
            resolved.append(self._resolved.of((id(row), len(of_row), structure), resolve).lanes)
        seconds = _seconds(pipeline)
        lanes = []
        for of_row, resolved_row in zip(starts, resolved, strict=True):
            own = [Lane(start, each, seconds) for start, each in zip(of_row, resolved_row, strict=True)]
            for lane in own:
                lane.first = len(self.end_s)
                self._nodes(len(lane.computes), None)
                if lane.start.copies:
                    lane.copies = ActivationCopies(lane.start.copies, lane.computes)
                lane.weight_waits = {lane.computes.index(action): wait for action, wait in lane.start.weight_waits}
            lanes.append(own)
        return lanes

    def _add_transfers(
        self, replica: int, kind: ActionKind, ends: tuple[int, int], slices: Sequence[Slice], num_slices: int
    ) -> None:
        """Add the transfers of one direction of a boundary between two stages."""
        step = len(slices)
        wires = self._own_wires(list(dict.fromkeys(pair for each in slices for pair in each)))
        for phase, each in enumerate(slices):
            for pair, cost in each.items():
                count = len(range(phase, num_slices, step))
                of_ports = [self._port(port) for port, _ in cost.ports]
                series = TransferSeries(
                    replica,
                    *ends,
                    kind,
                    *pair,
                    phase,
                    step,
                    len(self.end_s),
                    count,
                    cost,
                    (*wires[pair], *of_ports),
                    (*[cost.seconds] * len(wires[pair]), *(busy_s for _, busy_s in cost.ports)),
                )
                self._nodes(count, series)
                self.transfers.append(series)

    def _own_wires(self, pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        """The wires of each pair of lanes, beside the network's interfaces.

        A device sends one message after the other, and receives likewise: a wire per lane and way, or one for both
        where a lane has but one on the other side.
        """
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
        posted_once, end_s = bytearray(len(self.end_s)), self.end_s
        awaited: dict[int, Lane] = {}
        while events:
            now_s, _, lane = heappop(events)
            position = lane.position
            ready = []
            for n in lane.posts[position]:
                if not posted_once[n]:
                    posted_once[n] = True
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

    def _compute(self, lane: Lane) -> float:
        """Begin the next compute, all of whose transfers have started; when it ends."""
        position = lane.position
        start_s, cause = lane.clock_s, lane.last
        for n in lane.needs[position]:
            if self.end_s[n] > start_s:
                start_s, cause = self.end_s[n], n
        end_s = start_s + lane.seconds[position]
        if lane.weight_waits and position in lane.weight_waits:
            wait = lane.weight_waits[position]
            if wait.start_s > start_s:
                start_s, cause = wait.start_s, NO_CAUSE
            end_s = max(start_s + lane.seconds[position], wait.end_s)
        if lane.copies is not None:
            end_s = lane.copies.end_s(lane.computes[position], end_s, seconds=lane.seconds[position])
        n = lane.first + position
        self.start_s[n], self.end_s[n], self.cause[n] = start_s, end_s, cause
        lane.last = n
        lane.position = position + 1
        return end_s

    def _start(self, n: int, now_s: float, cause: int) -> None:
        """Take the wires as soon as all are free; what comes later queues up behind."""
        series = self._series_of[n]
        assert series is not None, "only transfers take wires"
        free_s, last = self._wire_free_s, self._wire_last
        start_s = now_s
        for wire in series.wires:
            if free_s[wire] > start_s:
                start_s, cause = free_s[wire], last[wire]
        for wire, busy_s in zip(series.wires, series.busy_s, strict=True):
            free_s[wire] = start_s + busy_s
            last[wire] = n
        self.start_s[n], self.end_s[n], self.cause[n] = start_s, start_s + series.cost.seconds, cause


SECONDS_OF = (ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.I, ActionKind.W)
"""The kinds of computes, in the order of :func:`_seconds`."""


def _seconds(pipeline: Pipeline) -> list[float]:
    """Seconds of a compute of each kind on each stage, kind by kind."""
    forward, backward = list(pipeline.forward_s), list(pipeline.backward_s)
    return [*forward, *forward, *backward, *backward, *pipeline.weight_s]


def _nodes_of_slices(
    edges: Sequence[StageBoundary], transfers: Sequence[TransferSeries]
) -> Mapping[ActionKind, Mapping[int, SliceNodes]]:
    """The nodes of all transfers of a pipeline, by what sends or receives them and by stage."""
    slice_nodes: dict[ActionKind, dict[int, SliceNodes]] = {
        ActionKind.SEND_F: {},
        ActionKind.RECV_F: {},
        ActionKind.SEND_B: {},
        ActionKind.RECV_B: {},
    }
    for series in transfers:
        received = ActionKind.RECV_F if series.kind == ActionKind.SEND_F else ActionKind.RECV_B
        for kind, stage, lane in (
            (series.kind, series.stage, series.lane),
            (received, series.receiver, series.receiving_lane),
        ):
            num_slices = edges[min(series.stage, series.receiver)].num_slices
            nodes = slice_nodes[kind].setdefault(stage, {}).setdefault(lane, [()] * num_slices)
            for n, number in zip(series.nodes, range(series.phase, num_slices, series.step), strict=True):
                nodes[number] += (n,)
    return slice_nodes


def _resolve_row(
    num_lanes: int,
    row: Row,
    counts: Sequence[int],
    slice_nodes: Callable[[], Mapping[ActionKind, Mapping[int, SliceNodes]]],
) -> ResolvedRow:
    return ResolvedRow(row, [_resolve(number, row, counts, slice_nodes()) for number in range(num_lanes)])


def _resolve(
    number: int, row: Row, counts: Sequence[int], slice_nodes: Mapping[ActionKind, Mapping[int, SliceNodes]]
) -> ResolvedLane:
    """What the lane of this number computes, what each compute needs, and what the lane posts in between."""
    own = {
        kind: {stage: lanes[number] for stage, lanes in of_stages.items() if number in lanes}
        for kind, of_stages in slice_nodes.items()
    }
    stages = {action.stage for action in row}
    inputs, gradients = (
        {s: _by_microbatch(slices, counts[s]) for s, slices in own[kind].items() if s in stages}
        for kind in (ActionKind.RECV_F, ActionKind.RECV_B)
    )
    wanted = {ActionKind.F: inputs, ActionKind.B: gradients, ActionKind.I: gradients}
    first_of = {kind: k * len(counts) for k, kind in enumerate(SECONDS_OF)}
    computes: list[Action] = []
    durations: list[int] = []
    needs: list[tuple[int, ...]] = []
    posts: list[tuple[int, ...]] = []
    between: list[int] = []
    for action in row:
        stage, kind, index = action
        if kind in own:
            of_stage = own[kind].get(stage)
            if of_stage is not None:
                between += of_stage[index]
            continue
        posts.append(tuple(between))
        between = []
        needed = wanted[kind].get(stage) if kind in wanted else None
        computes.append(action)
        durations.append(first_of[kind] + stage)
        needs.append(needed[index] if needed is not None else ())
    posts.append(tuple(between))
    return ResolvedLane(computes, durations, needs, posts)


def _by_microbatch(slices: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The transfers of each of ``count`` microbatches."""
    per = len(slices) // count
    return [tuple(chain.from_iterable(slices[m * per : (m + 1) * per])) for m in range(count)]
