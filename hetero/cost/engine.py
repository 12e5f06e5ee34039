"""A discrete-event replay of action lists: stages that compute, transfers that take turns on the wires.

Two manners of execution. In ours, a SEND starts and a RECV posts at once, the transfer runs as soon as both have
happened and its wires are free, and only the compute that needs a slice waits for it. In the blocking manner, sender
and receiver meet at the action and both stand still until the last byte has arrived.

Events are handled in order of time, ties in order of creation, so that a replay is deterministic.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.cost.network import Port, TransferCost
from hetero.errors import ScheduleError
from hetero.schedule.actions import Kind, Schedule, boundaries

NO_CAUSE = -1


@dataclass(slots=True)
class Span:
    """One action that took time.

    stage: of the compute, or the sender's of a transfer; ``receiver`` is ``stage`` for a compute.
    cause: index of the span whose end let this one start, ``NO_CAUSE`` if it started at 0.
    """

    replica: int
    stage: int
    receiver: int
    kind: Kind
    number: int
    start_s: float
    end_s: float
    cause: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One replica as the engine needs it.

    rows: one list of actions per stage.
    backward_s, weight_s: of a B and of a W; a stage without W has the whole backward in its B.
    forward, backward: per boundary, the costs of its different slices in that direction; slice i costs as
        ``costs[i % len(costs)]``.
    """

    rows: Schedule
    num_microbatches: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    forward: tuple[tuple[TransferCost, ...], ...]
    backward: tuple[tuple[TransferCost, ...], ...]
    weight_s: tuple[float, ...] = ()


def replay(pipelines: Sequence[Pipeline], *, blocking: bool) -> list[Span]:
    """All spans of pipelines that start together and share network interfaces, in order of creation.

    Raises:
        ScheduleError: no stage can move, and not all are done.
    """
    engine = _Engine(blocking=blocking)
    for replica, pipeline in enumerate(pipelines):
        engine.add(replica, pipeline)
    return engine.run()


@dataclass(slots=True)
class _Wire:
    """What one transfer at a time uses: a direction of a boundary, or of a network interface."""

    free_s: float = 0.0
    last_span: int = NO_CAUSE


@dataclass(slots=True, eq=False)
class _Stage:
    """A stage and how far it has come. It waits while ``missing`` transfers have not arrived."""

    replica: int
    index: int
    steps: "list[_Compute | _Transfer]" = field(default_factory=list)
    position: int = 0
    clock_s: float = 0.0
    last_span: int = NO_CAUSE
    missing: int = 0


@dataclass(slots=True, eq=False)
class _Transfer:
    """A slice on its way. Both ends have to reach it before it starts.

    ready_s: when the later end did; ``cause`` is the span that held that end up.
    awaited: a compute of the receiver stands still until it arrives.
    wires: of the boundary's direction first, then those of the interfaces as ``cost`` lists them.
    """

    kind: Kind
    number: int
    sender: _Stage
    receiver: _Stage
    cost: TransferCost
    wires: list[_Wire]
    ends: int = 0
    ready_s: float = 0.0
    cause: int = NO_CAUSE
    span: int = NO_CAUSE
    done: bool = False
    awaited: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Compute:
    """A compute, and the transfers that it needs; none in the blocking manner, which has them already."""

    kind: Kind
    number: int
    seconds: float
    needs: list[_Transfer]


class _Engine:
    def __init__(self, *, blocking: bool) -> None:
        self._blocking = blocking
        self._stages: list[_Stage] = []
        self._wires: dict[Port, _Wire] = {}
        self._events: list[tuple[float, int, _Transfer | _Stage]] = []
        self._created = 0
        self.spans: list[Span] = []

    def add(self, replica: int, pipeline: Pipeline) -> None:
        """Resolve every action of ``pipeline`` to what it does."""
        edges = boundaries(pipeline.num_microbatches)
        stages = [_Stage(replica, s) for s in range(len(pipeline.rows))]
        forward, backward = [], []
        for b, edge in enumerate(edges):
            here, after = stages[b], stages[b + 1]
            forward.append(self._slices(Kind.SEND_F, here, after, pipeline.forward[b], edge.num_slices))
            backward.append(self._slices(Kind.SEND_B, after, here, pipeline.backward[b], edge.num_slices))
        for s, stage in enumerate(stages):
            before = edges[s - 1] if s > 0 else None
            after_edge = edges[s] if s < len(edges) else None
            for _, kind, number in pipeline.rows[s]:
                match kind:
                    case Kind.F:
                        needs = [forward[s - 1][i] for i in before.slices_after(number)] if before else []
                        stage.steps.append(self._compute_step(kind, number, pipeline.forward_s[s], needs))
                    case Kind.B | Kind.I:
                        needs = [backward[s][i] for i in after_edge.slices_before(number)] if after_edge else []
                        stage.steps.append(self._compute_step(kind, number, pipeline.backward_s[s], needs))
                    case Kind.W:
                        stage.steps.append(self._compute_step(kind, number, pipeline.weight_s[s], []))
                    case Kind.SEND_F:
                        stage.steps.append(forward[s][number])
                    case Kind.RECV_F:
                        stage.steps.append(forward[s - 1][number])
                    case Kind.SEND_B:
                        stage.steps.append(backward[s - 1][number])
                    case Kind.RECV_B:
                        stage.steps.append(backward[s][number])
        self._stages += stages

    def _compute_step(self, kind: Kind, number: int, seconds: float, needs: list[_Transfer]) -> _Compute:
        return _Compute(kind, number, seconds, [] if self._blocking else needs)

    def _slices(
        self, kind: Kind, sender: _Stage, receiver: _Stage, costs: Sequence[TransferCost], num_slices: int
    ) -> list[_Transfer]:
        """Every slice of one direction of a boundary."""
        own = _Wire()
        wires = [[own, *(self._wires.setdefault(port, _Wire()) for port, _ in cost.ports)] for cost in costs]
        n = len(costs)
        return [_Transfer(kind, i, sender, receiver, costs[i % n], wires[i % n]) for i in range(num_slices)]

    def run(self) -> list[Span]:
        for stage in self._stages:
            self._advance(stage, 0.0)
        while self._events:
            now_s, _, subject = heapq.heappop(self._events)
            if isinstance(subject, _Stage):
                self._advance(subject, now_s)
            elif subject.span == NO_CAUSE:
                self._start(subject, now_s)
            else:
                self._arrive(subject, now_s)
        stuck = [stage for stage in self._stages if stage.position < len(stage.steps)]
        if stuck:
            waiting = ", ".join(f"stage {s.index} before its action {s.position}" for s in stuck)
            raise ScheduleError(f"the replay stands still: {waiting}")
        return self.spans

    def _push(self, at_s: float, subject: _Transfer | _Stage) -> None:
        self._created += 1
        heapq.heappush(self._events, (at_s, self._created, subject))

    def _advance(self, stage: _Stage, now_s: float) -> None:
        """Run actions of ``stage`` until one takes time or has to wait."""
        stage.clock_s = now_s
        steps = stage.steps
        while stage.position < len(steps):
            step = steps[stage.position]
            if isinstance(step, _Compute):
                for transfer in step.needs:
                    if not transfer.done:
                        transfer.awaited = True
                        stage.missing += 1
                if not stage.missing:
                    self._compute(stage, step)
                return
            stage.position += 1
            self._reach(step, stage)
            if self._blocking:
                return

    def _compute(self, stage: _Stage, step: _Compute) -> None:
        cause = stage.last_span
        for transfer in step.needs:
            if cause == NO_CAUSE or self.spans[transfer.span].end_s > self.spans[cause].end_s:
                cause = transfer.span
        end_s = stage.clock_s + step.seconds
        stage.last_span = len(self.spans)
        span = Span(stage.replica, stage.index, stage.index, step.kind, step.number, stage.clock_s, end_s, cause)
        self.spans.append(span)
        stage.position += 1
        self._push(end_s, stage)

    def _reach(self, transfer: _Transfer, stage: _Stage) -> None:
        """One end has come to the transfer; the later of the two makes it ready."""
        transfer.ends += 1
        if stage.clock_s >= transfer.ready_s:
            transfer.ready_s = stage.clock_s
            transfer.cause = stage.last_span
        if transfer.ends == 2:
            self._push(transfer.ready_s, transfer)

    def _start(self, transfer: _Transfer, now_s: float) -> None:
        """Take the wires as soon as all are free; what comes later queues up behind."""
        start_s, cause = now_s, transfer.cause
        for wire in transfer.wires:
            if wire.free_s > start_s:
                start_s, cause = wire.free_s, wire.last_span
        end_s = start_s + transfer.cost.seconds
        transfer.span = len(self.spans)
        sender, receiver = transfer.sender, transfer.receiver
        self.spans.append(
            Span(sender.replica, sender.index, receiver.index, transfer.kind, transfer.number, start_s, end_s, cause)
        )
        own, *interfaces = transfer.wires
        own.free_s, own.last_span = end_s, transfer.span
        for wire, (_, busy_s) in zip(interfaces, transfer.cost.ports, strict=True):
            wire.free_s, wire.last_span = start_s + busy_s, transfer.span
        self._push(end_s, transfer)

    def _arrive(self, transfer: _Transfer, now_s: float) -> None:
        transfer.done = True
        if self._blocking:
            for stage in (transfer.sender, transfer.receiver):
                stage.last_span = transfer.span
                self._advance(stage, now_s)
        elif transfer.awaited:
            # Its clock was left at the time from which it waits; the arrival ends the wait.
            stage = transfer.receiver
            stage.missing -= 1
            if not stage.missing:
                self._advance(stage, now_s)
