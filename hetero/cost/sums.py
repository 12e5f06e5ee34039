"""When the sums of gradients of a step start and end.

A rank launches its buckets in the global order, each as soon as it has launched those before and has the gradients. A
bucket that all its holders have launched is ready: it starts when its holders have done with sums that were ready
before, and so have the network interfaces of its first phase. A later bucket of other holders need not wait for an
earlier one that still lacks a holder.

Interfaces belong to the transfers of the pipeline first: these take the times that they take without any sum, and sums
get along with what is left between them. So a sum is somewhat late where both meet, and the pipeline never is.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetero.cost.gradients import SyncBucket
from hetero.cost.network import Port, SumCost

Interval = tuple[float, float]
"""Seconds of the step, start and end."""


@dataclass(frozen=True, slots=True)
class SyncSpan:
    """One sum of gradients as it ran."""

    bucket: SyncBucket
    start_s: float
    end_s: float


def run_sums(
    buckets: Iterable[SyncBucket],
    *,
    cost_of: Callable[[SyncBucket], SumCost],
    complete_s: Callable[[int, int], float],
    transfers: Mapping[Port, Sequence[Interval]],
) -> tuple[SyncSpan, ...]:
    """The sums of ``buckets``, which come in the global order, in the order in which they are ready.

    Args:
        complete_s: when a rank has the gradients of a position and all above.
        transfers: when the pipeline uses each interface.
    """
    launched: dict[int, float] = defaultdict(float)
    ready: list[tuple[float, int, SyncBucket]] = []
    for i, bucket in enumerate(buckets):
        for rank in bucket.ranks:
            launched[rank] = max(launched[rank], complete_s(rank, bucket.position))
        ready.append((max(launched[rank] for rank in bucket.ranks), i, bucket))
    free: dict[int, float] = defaultdict(float)
    interfaces = _Interfaces(transfers)
    spans = []
    for ready_s, _, bucket in sorted(ready, key=lambda item: item[:2]):
        phases = cost_of(bucket).phases
        start_s = end_s = interfaces.free_s(
            [port for port, _ in phases[0].ports], max(ready_s, *(free[rank] for rank in bucket.ranks))
        )
        for phase in phases:
            end_s = interfaces.use(phase.ports, phase.seconds, end_s)
        for rank in bucket.ranks:
            free[rank] = end_s
        spans.append(SyncSpan(bucket, start_s, end_s))
    return tuple(spans)


class _Interfaces:
    """All directions of all network interfaces: sums take turns, transfers go first."""

    def __init__(self, transfers: Mapping[Port, Sequence[Interval]]) -> None:
        self._free: dict[Port, float] = defaultdict(float)
        self._taken = {port: _merged(intervals) for port, intervals in transfers.items()}
        self._ends = {port: [end for _, end in taken] for port, taken in self._taken.items()}

    def free_s(self, ports: Sequence[Port], at_s: float) -> float:
        """When, from ``at_s`` on, no earlier sum uses any of ``ports``."""
        return max([at_s, *(self._free[port] for port in ports)])

    def use(self, ports: Sequence[tuple[Port, float]], seconds: float, at_s: float) -> float:
        """When something of ``seconds`` ends that uses interfaces for so long each, from ``at_s`` on."""
        at_s = self.free_s([port for port, _ in ports], at_s)
        late_s = 0.0
        for port, busy_s in ports:
            self._free[port] = self._end(port, at_s, busy_s)
            late_s = max(late_s, self._free[port] - at_s - busy_s)
        return at_s + seconds + late_s

    def _end(self, port: Port, at_s: float, busy_s: float) -> float:
        """When ``port`` has had ``busy_s`` seconds from ``at_s`` on beside its transfers."""
        taken = self._taken.get(port, ())
        for i in range(bisect_right(self._ends.get(port, ()), at_s), len(taken)):
            start_s, end_s = taken[i]
            gap_s = max(0.0, start_s - at_s)
            if busy_s <= gap_s:
                break
            busy_s -= gap_s
            at_s = end_s
        return at_s + busy_s


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same seconds in disjoint intervals, in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end_s)
        else:
            merged.append((start_s, end_s))
    return merged
