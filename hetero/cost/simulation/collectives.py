"""When the collectives of a step start and end: the sums of gradients, and the gathers of weights.

A rank launches its collectives in their order, each as soon as it has launched those before and what it needs is there.
A collective that all its holders have launched is ready: it starts when its holders have done with collectives that
were ready before, and so have the network interfaces of its first phase. A later bucket of other holders need not wait
for an earlier one that still lacks a holder.

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
from hetero.cost.network import Port, SumCost
from hetero.cost.simulation.exposed_communication import TimeInterval
from hetero.plan.ir import Ranks

PartyT = TypeVar("PartyT", bound=Hashable)
"""Ranks that have everything at the same time."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """One collective on a bucket as it ran."""

    bucket: CountedBucket
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """
    spans: in the order in which they were ready.
    free_s: from when on each interface that they took is free.
    """

    spans: tuple[CollectiveSpan, ...]
    free_s: Mapping[Port, float]


def run_collectives(
    buckets: Iterable[CountedBucket],
    *,
    cost_of: Callable[[CountedBucket], SumCost],
    ready_s: Callable[[PartyT, float], float],
    party_of: Mapping[int, PartyT],
    transfers: Mapping[Port, Sequence[TimeInterval]] | None = None,
) -> CollectiveRun:
    """The collectives on ``buckets``, in the order in which all ranks launch them.

    Args:
        ready_s: when a party may launch what it has of a position.
        party_of: by rank.
        transfers: when the pipeline uses each interface.
    """
    buckets = list(buckets)
    classes, parties = _classes(buckets, party_of)
    launched = [0.0] * len(parties)
    ready: list[tuple[float, int, CountedBucket]] = []
    for i, bucket in enumerate(buckets):
        at_s = 0.0
        for c in classes[bucket.ranks]:
            launched[c] = max(launched[c], ready_s(parties[c], bucket.position))
            at_s = max(at_s, launched[c])
        ready.append((at_s, i, bucket))
    free = [0.0] * len(parties)
    interfaces = _Interfaces(transfers or {})
    spans = []
    for at_s, _, bucket in sorted(ready, key=lambda item: item[:2]):
        phases = cost_of(bucket).phases
        own = classes[bucket.ranks]
        start_s = end_s = interfaces.free_s(phases[0].ports, max([at_s, *(free[c] for c in own)]))
        for phase in phases:
            end_s = interfaces.use(phase.ports, phase.seconds, end_s)
        for c in own:
            free[c] = end_s
        spans.append(CollectiveSpan(bucket, start_s, end_s))
    return CollectiveRun(tuple(spans), interfaces.free)


def parties_of(buckets: Iterable[CountedBucket], party_of: Mapping[int, PartyT]) -> dict[Ranks, set[PartyT]]:
    """By holders of a bucket, the parties that they are in."""
    return {ranks: {party_of[rank] for rank in ranks} for ranks in {bucket.ranks for bucket in buckets}}


def _classes(
    buckets: Iterable[CountedBucket], party_of: Mapping[int, PartyT]
) -> tuple[dict[Ranks, list[int]], list[PartyT]]:
    """By holders of a bucket, the classes of their ranks: those of a party that hold the same buckets. And by class,
    its party."""
    held: dict[int, list[int]] = defaultdict(list)
    holders = list(dict.fromkeys(bucket.ranks for bucket in buckets))
    for n, ranks in enumerate(holders):
        for rank in ranks:
            held[rank].append(n)
    numbers: dict[tuple[PartyT, tuple[int, ...]], None] = dict.fromkeys(
        (party_of[rank], tuple(of_rank)) for rank, of_rank in held.items()
    )
    classes: dict[Ranks, list[int]] = {ranks: [] for ranks in holders}
    for c, (_, of_class) in enumerate(numbers):
        for n in of_class:
            classes[holders[n]].append(c)
    return classes, [party for party, _ in numbers]


class _Interfaces:
    """All directions of all network interfaces: collectives take turns, transfers go first."""

    def __init__(self, transfers: Mapping[Port, Sequence[TimeInterval]]) -> None:
        self.free: dict[Port, float] = {}
        self._taken = {port: _merged(intervals) for port, intervals in transfers.items()}
        self._ends = {port: [end for _, end in taken] for port, taken in self._taken.items()}

    def free_s(self, ports: Sequence[tuple[Port, float]], at_s: float) -> float:
        """When, from ``at_s`` on, no earlier collective uses any of ``ports``."""
        free = self.free
        for port, _ in ports:
            at_s = max(at_s, free.get(port, 0.0))
        return at_s

    def use(self, ports: Sequence[tuple[Port, float]], seconds: float, at_s: float) -> float:
        """When something of ``seconds`` ends that uses interfaces for so long each, from ``at_s`` on."""
        at_s = self.free_s(ports, at_s)
        late_s = 0.0
        for port, busy_s in ports:
            end_s = at_s + busy_s
            if port in self._taken:
                alone_s, end_s = end_s, self._end(port, at_s, busy_s)
                late_s = max(late_s, end_s - alone_s)
            self.free[port] = end_s
        return at_s + seconds + late_s

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
