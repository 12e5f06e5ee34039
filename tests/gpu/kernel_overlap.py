"""How much of a rank's communication runs beside its compute, from what torch's profiler recorded on its device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """A kernel or copy as it ran on a stream of the device, in microseconds."""

    name: str
    stream: int
    start_us: float
    end_us: float

    @property
    def communicates(self) -> bool:
        return "nccl" in self.name.lower()


@dataclass(frozen=True, slots=True)
class Overlap:
    """communication_us: of NCCL's kernels; ``hidden_us``: of those, while something was computed.

    shared_streams: on which both sorts of kernels ran.
    """

    communication_us: float
    hidden_us: float
    shared_streams: frozenset[int]


def overlap(spans: Sequence[KernelSpan]) -> Overlap:
    """Of one device."""
    computes = _union((span.start_us, span.end_us) for span in spans if not span.communicates)
    transfers = _union((span.start_us, span.end_us) for span in spans if span.communicates)
    hidden = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in transfers
        for other_start, other_end in computes
    )
    streams = [{span.stream for span in spans if span.communicates == which} for which in (True, False)]
    return Overlap(
        communication_us=sum(end - start for start, end in transfers),
        hidden_us=hidden,
        shared_streams=frozenset(streams[0] & streams[1]),
    )


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that touch become one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
