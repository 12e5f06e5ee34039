"""Replays the replicas of a plan side by side; of those that would run alike, one is replayed for all."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import overload

from hetero.cost.network import Port, TransferCost
from hetero.cost.runtime_model import RuntimeModel
from hetero.cost.simulation.blocking_replay import BatchedReplay, BlockingReplay
from hetero.cost.simulation.engine import NO_CAUSE, Lane, Pipeline, Replay, Span, transfer_costs
from hetero.cost.simulation.exposed_communication import TimeInterval, exposed_s
from hetero.cost.simulation.simulated_plan import KnownParts, LaneKey
from hetero.schedule.actions import BACKWARD, Action


def replay_of(runtime: RuntimeModel) -> type[Replay]:
    """How transfers take their time under ``runtime``."""
    if not runtime.blocking_transfers:
        return Replay
    return BatchedReplay if runtime.batches_transfers else BlockingReplay


class ReplicaReplays:
    """The replays of all different sets of replicas that share interfaces.

    alike: for each replica, the one that was replayed for it.

    Args:
        free_s: from when on each interface is free for the pipelines.
        known: replays of other plans, which may have some of these replicas.
        within_s: as of :class:`~.engine.Replay`.

    Raises:
        ScheduleError: a replica stands still.
        StepTooLong: a compute ends after ``within_s``.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        *,
        runtime: RuntimeModel,
        free_s: Mapping[Port, float],
        known: KnownParts,
        within_s: float = math.inf,
    ) -> None:
        self._pipelines = pipelines
        replay_class = replay_of(runtime)
        alike = list(range(len(pipelines)))
        twins: dict[object, list[int]] = {}
        self._replays: list[tuple[Replay, list[int]]] = []
        self._place: dict[int, tuple[Replay, int]] = {}
        self._exposed: dict[LaneKey, float] = {}
        for members in _sharing_interfaces(pipelines):
            together = [pipelines[r] for r in members]
            signature = _signature(together, free_s)
            if signature in twins:
                for r, twin in zip(members, twins[signature], strict=True):
                    alike[r] = twin
                continue
            twins[signature] = members
            _, replay = known.replays.of(
                (replay_class, signature),
                lambda: (
                    together,  # noqa: B023
                    replay_class(together, free_s=free_s, resolved=known.resolved, within_s=within_s),  # noqa: B023
                ),
            )
            self._replays.append((replay, members))
            self._place |= {r: (replay, i) for i, r in enumerate(members)}
        self.alike = tuple(alike)

    def lane(self, key: LaneKey) -> tuple[Replay, Lane]:
        """The replay that shows what a lane did, and its lane there."""
        replay, i = self._place[self.alike[key.replica]]
        return replay, replay.lanes[i][key.group][key.lane]

    def interval(self, key: LaneKey, action: Action) -> TimeInterval:
        """When a lane ran one of its computes."""
        replay, lane = self.lane(key)
        node = lane.node(action)
        return replay.start_s[node], replay.end_s[node]

    def end_s(self, key: LaneKey) -> float:
        """When a lane has computed everything."""
        replay, lane = self.lane(key)
        return replay.end_s[lane.nodes[-1]]

    def busy_s(self, key: LaneKey) -> float:
        """Seconds of all computes of a lane, without what it waits for."""
        return sum(self.lane(key)[1].seconds)

    def exposed_s(self, key: LaneKey) -> float:
        """How long a lane waited while what it waited for was on the wire."""
        twin = key._replace(replica=self.alike[key.replica])
        if twin not in self._exposed:
            replay, lane = self.lane(twin)
            computes, arrivals = (
                [(replay.start_s[n], replay.end_s[n]) for n in nodes]
                for nodes in (lane.nodes, chain.from_iterable(lane.needs))
            )
            self._exposed[twin] = exposed_s(computes, arrivals, begin_s=lane.start.at_s)
        return self._exposed[twin]

    def spans(self) -> list[Span]:
        """The spans of all replays; their ``replica`` is the one that was replayed."""
        found: list[Span] = []
        for replay, members in self._replays:
            first = len(found)
            for span in replay.spans():
                span.replica = members[span.replica]
                span.cause += first if span.cause != NO_CAUSE else 0
                found.append(span)
        return found

    def late_transfers(self) -> dict[Port, tuple[TimeInterval, ...]]:
        """When transfers use each interface, from the start of the earliest last backward on: no sum begins before."""
        first_s = min(
            replay.start_s[n]
            for replay, _ in self._replays
            for rows in replay.lanes
            for row in rows
            for lane in row
            for n in _last_backwards(lane)
        )
        late: dict[int, list[list[float]]] = defaultdict(list)
        for replay, members in self._replays:
            for series in replay.transfers:
                late[members[series.replica]].append(
                    [replay.start_s[n] for n in series.nodes if replay.end_s[n] > first_s]
                )
        found: dict[Port, list[TimeInterval]] = defaultdict(list)
        for pipeline, twin in zip(self._pipelines, self.alike, strict=True):
            for starts, cost in zip(late[twin], transfer_costs(pipeline), strict=True):
                for port, busy_s in cost.ports if starts else ():
                    found[port] += [(start_s, start_s + busy_s) for start_s in starts]
        return {port: tuple(intervals) for port, intervals in found.items()}


class Spans(Sequence[Span]):
    """The spans of replays, made when they are looked at: most simulations are asked for their times alone."""

    def __init__(self, replays: ReplicaReplays) -> None:
        self._replays = replays

    @cached_property
    def _every(self) -> list[Span]:
        return self._replays.spans()

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...

    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return self._every[index]

    def __len__(self) -> int:
        return len(self._every)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def _last_backwards(lane: Lane) -> Iterator[int]:
    """The node of the last backward of each stage."""
    missing = {action.stage for action in lane.computes}
    for n in reversed(lane.nodes):
        stage, kind, _ = lane.computes[n - lane.first]
        if stage in missing and kind in BACKWARD:
            yield n
            missing.remove(stage)
            if not missing:
                return


def _sharing_interfaces(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """Replicas in groups, such that no two groups use one interface."""
    first_user: dict[Port, int] = {}
    # Each replica points to an earlier one of its group, the first to itself.
    earlier = list(range(len(pipelines)))

    def first_of(r: int) -> int:
        while earlier[r] != r:
            earlier[r] = r = earlier[earlier[r]]
        return r

    for r, pipeline in enumerate(pipelines):
        own = r
        for port in {port for cost in transfer_costs(pipeline) for port, _ in cost.ports}:
            user = first_user.setdefault(port, r)
            if user != own and (other := first_of(user)) != own:
                own, later = min(own, other), max(own, other)
                earlier[later] = own
    groups: dict[int, list[int]] = defaultdict(list)
    for r in range(len(pipelines)):
        groups[first_of(r)].append(r)
    return list(groups.values())


def _signature(pipelines: Sequence[Pipeline], free_s: Mapping[Port, float]) -> object:
    """Equal for sets of replicas that run alike: everything but the interfaces' names.

    It names rows by their ``id``, so whoever keeps it keeps the pipelines.
    """
    names: dict[Port, int] = {}

    def anonymous(cost: TransferCost) -> object:
        ports = [(names.setdefault(port, len(names)), free_s.get(port, 0.0), busy_s) for port, busy_s in cost.ports]
        return cost.seconds, tuple(ports)

    return tuple(
        (
            tuple(map(id, pipeline.rows)),
            pipeline.forward_s,
            pipeline.backward_s,
            pipeline.weight_s,
            pipeline.lanes,
            tuple(
                tuple((pair, anonymous(cost)) for pair, cost in each.items())
                for slices in pipeline.forward + pipeline.backward
                for each in slices
            ),
        )
        for pipeline in pipelines
    )
