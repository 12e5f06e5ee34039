"""Finds the smallest in-flight depths for a period, and the least period that memory allows, for inner loops."""

from collections.abc import Sequence

from hetero.cost.pipeline_period import ROUNDING, steady_period_s

BISECTIONS = 7


def smallest_depths(times: Sequence[float], transfers: Sequence[float], period: float) -> list[int]:
    """Compute the depths of :func:`hetero.cost.pipeline_period.smallest_depths` from sums of everything before each
    stage, without its checks."""
    starts = [0.0]
    for seconds, transfer in zip(times, transfers, strict=False):
        starts.append(starts[-1] + seconds + 2 * transfer)
    ends = [start + seconds for start, seconds in zip(starts, times, strict=True)]
    scale = (1 - ROUNDING) / period
    last = len(times) - 1
    depths = [1] * len(times)
    for i in range(last - 1, -1, -1):
        start = starts[i]
        deepest = 1
        for k in range(i + 1, last + 1):
            depth = depths[k] - 1 - int((start - ends[k]) * scale // 1)
            if depth > deepest:
                deepest = depth
        depths[i] = deepest
    return depths


def least_period(
    times: Sequence[float], transfers: Sequence[float], caps: Sequence[int], low: float
) -> tuple[float, list[int]]:
    """The least period, from ``low`` on, whose smallest depths stay within ``caps``, and these depths.

    From stage i to the last and back takes w_i, which N_i microbatches share: no period is below w_i / caps_i. From
    there on the search bisects.

    caps: at least 1 each; depth 1 everywhere, one microbatch at a time, is always possible.
    """
    way_s = high = sum(times) + 2 * sum(transfers)
    for i, cap in enumerate(caps):
        low = max(low, way_s / cap)
        way_s -= times[i] + (2 * transfers[i] if i < len(transfers) else 0.0)
    depths = smallest_depths(times, transfers, low)
    if not _within(depths, caps):
        depths = [1] * len(times)
        high = min(high, 2 * low)
        if not _within(smallest_depths(times, transfers, high), caps):
            low, high = high, sum(times) + 2 * sum(transfers)
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            deeper = smallest_depths(times, transfers, middle)
            if _within(deeper, caps):
                high, depths = middle, deeper
            else:
                low = middle
        if max(depths) == 1:
            depths = smallest_depths(times, transfers, high)
    return steady_period_s(microbatch_s=times, boundary_s=transfers, in_flight=depths), depths


def _within(depths: Sequence[int], caps: Sequence[int]) -> bool:
    return all(depth <= cap for depth, cap in zip(depths, caps, strict=True))
