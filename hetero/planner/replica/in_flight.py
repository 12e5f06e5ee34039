"""Finds the least period of a pipeline whose in-flight depths memory limits, for the inner loops of the search."""

from collections.abc import Sequence

from hetero.cost.pipeline_period import smallest_depths, steady_period_s

BISECTIONS = 7
"""Of the period: over a factor of two, as mostly, they leave 0.5 % of it. A heuristic."""


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
    depths = smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=low)
    if not _within(depths, caps):
        depths = [1] * len(times)
        high = min(high, 2 * low)
        if not _within(smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=high), caps):
            low, high = high, sum(times) + 2 * sum(transfers)
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            deeper = smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=middle)
            if _within(deeper, caps):
                high, depths = middle, deeper
            else:
                low = middle
        if max(depths) == 1:
            depths = smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=high)
    return steady_period_s(microbatch_s=times, boundary_s=transfers, in_flight=depths), depths


def _within(depths: Sequence[int], caps: Sequence[int]) -> bool:
    return all(depth <= cap for depth, cap in zip(depths, caps, strict=True))
