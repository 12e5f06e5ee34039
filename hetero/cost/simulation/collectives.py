"""Says when the collectives of a step start and end: the sums of gradients, and the gathers of weights.

A rank launches its collectives in their order, each as soon as it has launched those before and what it needs is there.
A collective that all its ranks have launched is ready: it starts when its ranks have done with collectives that
were ready before, and so have the network interfaces of its first phase. A later bucket of other ranks need not wait
for an earlier one that still lacks a rank.

Interfaces belong to the transfers of the pipeline first where these are given: they take the times that they take
without any collective, which get along with what is left between them. So a sum is somewhat late where both meet, and
the pipeline never is. Gathers are launched before the pipeline starts and have the interfaces to themselves.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetero.cost.gradient_volume import CountedBucket
from hetero.cost.network import CollectiveCost, Port
from hetero.cost.simulation.exposed_communication import TimeInterval
from hetero.plan.ir import Ranks

LaneT = TypeVar("LaneT", bound=Hashable)
"""What stands for ranks that have everything at the same time."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """One collective on a bucket as it ran."""

    bucket: CountedBucket
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """The collectives on the buckets of a step as they ran.

    spans: in the order in which they were ready.
    free_s: from when on each interface that they took is free.
    """

    spans: tuple[CollectiveSpan, ...]
    free_s: Mapping[Port, float]


def run_collectives(
    buckets: Iterable[CountedBucket],
    *,
    cost_of: Callable[[CountedBucket], CollectiveCost],
    ready_s: Callable[[LaneT, float], float],
    lane_of_rank: Mapping[int, LaneT],
    transfers: Mapping[Port, Sequence[TimeInterval]] | None = None,
) -> CollectiveRun:
    """The collectives on ``buckets``, in the order in which all ranks launch them.

    Args:
        ready_s: when a lane may launch what it has of a position.
        transfers: when the pipeline uses each interface.
    """
    buckets = list(buckets)
    classes, lanes = _classes(buckets, lane_of_rank)
    launched = [0.0] * len(lanes)
    ready: list[tuple[float, int, CountedBucket]] = []
    for i, bucket in enumerate(buckets):
        at_s = 0.0
        for c in classes[bucket.ranks]:
            launched[c] = max(launched[c], ready_s(lanes[c], bucket.position))
            at_s = max(at_s, launched[c])
        ready.append((at_s, i, bucket))
    free = [0.0] * len(lanes)
    interfaces = _Interfaces(transfers or {})
    spans = []
    for at_s, _, bucket in sorted(ready, key=lambda item: item[:2]):
        phases = cost_of(bucket).phases
        own = classes[bucket.ranks]
        end_s = max([at_s, *(free[c] for c in own)])
        starts_s = []
        for phase in phases:
            start_s, end_s = interfaces.use(phase.ports, phase.seconds, end_s)
            starts_s.append(start_s)
        for c in own:
            free[c] = end_s
        spans.append(CollectiveSpan(bucket, starts_s[0], end_s))
    return CollectiveRun(tuple(spans), interfaces.free)


def lanes_of_buckets(buckets: Iterable[CountedBucket], lane_of_rank: Mapping[int, LaneT]) -> dict[Ranks, set[LaneT]]:
    """By the ranks of a bucket, the lanes that they are in."""
    return {ranks: {lane_of_rank[rank] for rank in ranks} for ranks in {bucket.ranks for bucket in buckets}}


def _classes(
    buckets: Iterable[CountedBucket], lane_of_rank: Mapping[int, LaneT]
) -> tuple[dict[Ranks, list[int]], list[LaneT]]:
    """Classes of ranks of one lane that have the same buckets, and so launch all collectives at the same times.

    Returns:
        By the ranks of a bucket, the numbers of their classes; and by number, the lane.
    """
    buckets_of: dict[int, list[int]] = defaultdict(list)
    groups = list(dict.fromkeys(bucket.ranks for bucket in buckets))
    for n, ranks in enumerate(groups):
        for rank in ranks:
            buckets_of[rank].append(n)
    numbers: dict[tuple[LaneT, tuple[int, ...]], None] = dict.fromkeys(
        (lane_of_rank[rank], tuple(of_rank)) for rank, of_rank in buckets_of.items()
    )
    classes: dict[Ranks, list[int]] = {ranks: [] for ranks in groups}
    for c, (_, of_class) in enumerate(numbers):
        for n in of_class:
            classes[groups[n]].append(c)
    return classes, [lane for lane, _ in numbers]


class _Interfaces:
    """All directions of all network interfaces: collectives take turns, transfers go first."""

    def __init__(self, transfers: Mapping[Port, Sequence[TimeInterval]]) -> None:
        self.free: dict[Port, float] = {}
        self._taken = {port: _merged(intervals) for port, intervals in transfers.items()}
        self._ends = {port: [end for _, end in taken] for port, taken in self._taken.items()}

    def use(self, ports: Sequence[tuple[Port, float]], seconds: float, at_s: float) -> TimeInterval:
        """When something of ``seconds`` starts and ends that uses interfaces for so long each, from ``at_s`` on, or
        from when no earlier collective uses any of them."""
        for port, _ in ports:
            if (free_s := self.free.get(port, 0.0)) > at_s:
                at_s = free_s
        late_s = 0.0
        for port, busy_s in ports:
            end_s = at_s + busy_s
            if port in self._taken:
                alone_s, end_s = end_s, self._end(port, at_s, busy_s)
                late_s = max(late_s, end_s - alone_s)
            self.free[port] = end_s
        return at_s, at_s + seconds + late_s

    def _end(self, port: Port, at_s: float, busy_s: float) -> float:
        """When ``port`` has had ``busy_s`` seconds from ``at_s`` on beside its transfers."""
        taken = self._taken[port]
        for i in range(bisect_right(self._ends[port], at_s), len(taken)):
            start_s, end_s = taken[i]
            gap_s = max(0.0, start_s - at_s)
            if busy_s <= gap_s:
                break
            busy_s -= gap_s
            at_s = end_s
        return at_s + busy_s


def _merged(intervals: Sequence[TimeInterval]) -> list[TimeInterval]:
    """The same seconds in disjoint intervals, in order."""
    merged: list[TimeInterval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((start_s, end_s))
    return merged
