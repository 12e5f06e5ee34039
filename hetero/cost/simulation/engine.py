"""A discrete-event replay of action lists: lanes that compute, transfers that take turns on the wires.

A lane is the data-parallel ranks of a device group that do the same at the same times (:mod:`.lanes`); it has a clock
of its own. A SEND starts and a RECV posts at once, the transfer runs as soon as both have happened and its wires are
free, and only the compute that needs a slice waits for it. Runtimes whose transfers block are replayed by
:mod:`.blocking_replay`.

Everything that takes time is a node: a compute of a lane, or a transfer of a slice between two lanes. Its end is known
as soon as it starts, so that only the ends of computes are events: they are handled in order of time, ties in the order
in which they became known, and what a compute ends is first come first served on the wires. A replay is deterministic.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from hetero.cost.network import Port, TransferCost
from hetero.cost.simulation.activation_copies import NO_COPIES, ActivationCopies, LaneCopies
from hetero.cost.simulation.recent import Recent
from hetero.cost.simulation.resolved_rows import (
    ResolvedLane,
    ResolvedRow,
    Takes,
    TransferSeries,
    resolve_row,
)
from hetero.cost.simulation.step_limit import StepTooLong, latest_ends
from hetero.errors import ScheduleError
from hetero.schedule.actions import Action, ActionKind, Schedule, boundaries

NO_CAUSE = -1

_UNKNOWN = -1.0
"""In place of the end of a node that has not started."""

_NO_WIRES = Takes((), (), 0.0)
"""Of a compute."""

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
    copies: LaneCopies = NO_COPIES
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


class Lane:
    """A lane of a device group, and how far its replay has come.

    start: when it starts, and which of its computes wait for weights.
    computes: its actions that take time; the first of them is node ``first``, the others follow.
    seconds: per compute.
    needs: per compute, the transfers that it waits for.
    posts: the transfers that it posts, as sender or receiver, before its first compute, and behind each.
    latest_s: per compute, when it has to have ended for a step that is short enough.
    is_delayed: it waits for weights, or copies activations.
    """

    __slots__ = (
        "clock_s",
        "computes",
        "copies",
        "first",
        "is_delayed",
        "last",
        "latest_s",
        "missing",
        "needs",
        "num_computes",
        "position",
        "posts",
        "seconds",
        "start",
        "weight_waits",
    )

    def __init__(self, start: LaneStart, resolved: ResolvedLane, seconds: Sequence[float]) -> None:
        self.start = start
        self.computes = resolved.computes
        self.needs = resolved.needs
        self.posts = resolved.posts
        self.seconds = [seconds[i] for i in resolved.durations]
        self.first = 0
        self.num_computes = len(resolved.computes)
        self.latest_s: Sequence[float] = ()
        self.is_delayed = False
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


def transfer_costs(pipeline: Pipeline) -> Iterator[TransferCost]:
    """The costs of the transfers of a pipeline, in the order of a replay's ``transfers``."""
    for forward, backward in zip(pipeline.forward, pipeline.backward, strict=True):
        for slices in (*forward, *backward):
            yield from slices.values()


class Replay:
    """Runs pipelines side by side that share network interfaces.

    start_s, end_s, cause: of every node; ``cause`` is the node whose end let it start.
    lanes: by pipeline, row and lane.
    transfers: of all pipelines.

    Args:
        free_s: from when on each interface is free; from the start on those that are not listed.
        resolved: the rows of replays before: pipelines that differ in nothing but seconds have theirs in common.
        within_s: so many seconds after 0 all computes have to end; the replay is left as soon as one cannot.

    Raises:
        ScheduleError: no lane can move, and not all are done.
        StepTooLong: a compute ends after ``within_s``.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        *,
        free_s: Mapping[Port, float] | None = None,
        resolved: Recent[ResolvedRow] | None = None,
        within_s: float = math.inf,
    ) -> None:
        self.start_s: list[float] = []
        self.end_s: list[float] = []
        self.cause: list[int] = []
        self.transfers: list[TransferSeries] = []
        self._series_of: list[TransferSeries | None] = []
        self._takes: list[Takes] = []
        self._ports: dict[Port, int] = {}
        self._port_free_s = free_s or {}
        self._wire_free_s: list[float] = []
        self._wire_last: list[int] = []
        self._resolved: Recent[ResolvedRow] = Recent(0) if resolved is None else resolved
        self._within_s = within_s
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
        self._takes += [series.takes if series is not None else _NO_WIRES] * count

    def _add(self, replica: int, pipeline: Pipeline) -> list[list[Lane]]:
        """Resolve every action of ``pipeline`` to what it does."""
        edges, first_series = boundaries(pipeline.num_microbatches), len(self.transfers)
        for b, edge in enumerate(edges):
            self._add_transfers(replica, ActionKind.SEND_F, (b, b + 1), pipeline.forward[b], edge.num_slices)
            self._add_transfers(replica, ActionKind.SEND_B, (b + 1, b), pipeline.backward[b], edge.num_slices)
        starts = pipeline.lanes or ((LaneStart(),),) * len(pipeline.rows)
        seconds, back_s = _seconds(pipeline), _ways_back(pipeline)
        lanes = []
        for row, stages, of_row in zip(pipeline.rows, _stages_of_rows(pipeline), starts, strict=True):
            series = [each for each in self.transfers[first_series:] if each.stage in stages or each.receiver in stages]
            resolved = self._resolved.of(
                (id(row), len(of_row), len(edges), tuple(each.nodes_of_lanes for each in series)),
                partial(resolve_row, len(of_row), row, stages, edges, series),
            )
            own = [Lane(start, each, seconds) for start, each in zip(of_row, resolved.lanes, strict=True)]
            for lane in own:
                lane.first = len(self.end_s)
                self._nodes(len(lane.computes), None)
                if lane.start.copies.stages:
                    lane.copies = ActivationCopies(lane.start.copies, lane.computes)
                lane.weight_waits = {lane.computes.index(action): wait for action, wait in lane.start.weight_waits}
                lane.is_delayed = bool(lane.weight_waits) or lane.copies is not None
                lane.latest_s = latest_ends(lane.computes, lane.seconds, stages, back_s, self._within_s)
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
                    Takes.of(
                        (*wires[pair], *of_ports),
                        (*[cost.seconds] * len(wires[pair]), *(busy_s for _, busy_s in cost.ports)),
                        cost.seconds,
                    ),
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
        posted_once, ends_s = bytearray(len(self.end_s)), self.end_s
        awaited: dict[int, Lane] = {}
        start, compute = self._start, self._compute
        while events:
            now_s, _, lane = heappop(events)
            position, ready = lane.position, []
            for n in lane.posts[position]:
                if not posted_once[n]:
                    posted_once[n] = True
                    continue
                start(n, now_s, lane.last)
                if n in awaited:
                    waiting = awaited.pop(n)
                    waiting.missing -= 1
                    if not waiting.missing:
                        ready.append(waiting)
            if position < lane.num_computes:
                lane.clock_s = now_s
                for n in lane.needs[position]:
                    if ends_s[n] < 0.0:
                        awaited[n] = lane
                        lane.missing += 1
                if not lane.missing:
                    ready.append(lane)
            for each in ready:
                created += 1
                heappush(events, (compute(each), created, each))

    def _compute(self, lane: Lane) -> float:
        """Begin the next compute, all of whose transfers have started; when it ends."""
        position, start_s, cause = lane.position, lane.clock_s, lane.last
        ends = self.end_s
        for n in lane.needs[position]:
            if ends[n] > start_s:
                start_s, cause = ends[n], n
        end_s = start_s + lane.seconds[position]
        if lane.is_delayed:
            start_s, end_s, cause = self._delayed(lane, start_s, end_s, cause)
        if end_s > lane.latest_s[position]:
            raise StepTooLong
        n = lane.first + position
        self.start_s[n], ends[n], self.cause[n] = start_s, end_s, cause
        lane.last = n
        lane.position = position + 1
        return end_s

    def _delayed(self, lane: Lane, start_s: float, end_s: float, cause: int) -> tuple[float, float, int]:
        """Start, end and cause of the next compute if it waits for weights, or copies activations."""
        position = lane.position
        if position in lane.weight_waits:
            wait = lane.weight_waits[position]
            if wait.start_s > start_s:
                start_s, cause = wait.start_s, NO_CAUSE
            end_s = max(start_s + lane.seconds[position], wait.end_s)
        if lane.copies is not None:
            end_s = lane.copies.end_s(lane.computes[position], end_s, seconds=lane.seconds[position])
        return start_s, end_s, cause

    def _start(self, n: int, now_s: float, cause: int) -> None:
        """Take the wires as soon as all are free; what comes later queues up behind."""
        wires, uses, seconds = self._takes[n]
        free_s, last = self._wire_free_s, self._wire_last
        start_s = now_s
        for wire in wires:
            if free_s[wire] > start_s:
                start_s, cause = free_s[wire], last[wire]
        for wire, busy_s in uses:
            free_s[wire] = start_s + busy_s
            last[wire] = n
        self.start_s[n], self.end_s[n], self.cause[n] = start_s, start_s + seconds, cause


def _stages_of_rows(pipeline: Pipeline) -> Iterator[Set[int]]:
    """The stages of each row; where there are as many rows as stages, each has its own, in their order."""
    if len(pipeline.rows) == len(pipeline.num_microbatches):
        return ({s} for s in range(len(pipeline.rows)))
    return ({action.stage for action in row} for row in pipeline.rows)


def _seconds(pipeline: Pipeline) -> list[float]:
    """Seconds of a compute of each kind on each stage, kind by kind."""
    forward, backward = list(pipeline.forward_s), list(pipeline.backward_s)
    return [*forward, *forward, *backward, *backward, *pipeline.weight_s]


def _ways_back(pipeline: Pipeline) -> list[float]:
    """Seconds of a backward of each stage, and of the least transfer from the stage behind."""
    transfers = [min(cost.seconds for each in slices for cost in each.values()) for slices in pipeline.backward]
    return [sum(both) for both in zip(pipeline.backward_s, transfers, strict=False)]
