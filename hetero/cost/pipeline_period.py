"""Computes the steady period of 1F1B in closed form, and the smallest depths for a period.

With t_s the forward and backward seconds of a microbatch on stage s, c_s the one-way seconds of the boundary after
it and N_s the microbatches in flight, the steady state repeats every

    P = max( max_s t_s, max_s c_s, max_{i<k} ( sum_{j=i..k} t_j + 2 sum_{j=i..k-1} c_j ) / (N_i - N_k + 1) )

The last term is the way of one microbatch from stage i to stage k and back, shared by the N_i - N_k + 1 microbatches
that are on it at a time. It is the heaviest of all cycles in the graph of who waits for whom; a cycle that turns
round more often splits into such simple ones.

Exact for transfers that run beside the compute, both directions at once, no wire but a boundary's own; for stages
that count the same microbatches; and for depths that do not increase along the pipeline. How a t_s is divided into
forward and backward does not matter, and neither does it that c_s may differ in the two directions if 2 c_s is their
sum and max c_s the larger one.
"""

from collections.abc import Sequence
from itertools import pairwise

from hetero.errors import ScheduleError

ROUNDING = 1e-9
"""Relative: a depth that misses its period by less is deep enough."""


def steady_period_s(*, microbatch_s: Sequence[float], boundary_s: Sequence[float], in_flight: Sequence[int]) -> float:
    """Seconds per microbatch of steady 1F1B: P of the formula above.

    Args:
        microbatch_s: t_s of every stage.
        boundary_s: c_s of every boundary, one less.
        in_flight: N_s of every stage, not increasing.

    Raises:
        ScheduleError: the lengths do not fit, or a depth is below 1 or above the one before it.
    """
    _check(microbatch_s, boundary_s, in_flight)
    period = max(microbatch_s)
    for i in range(len(microbatch_s)):
        way_s = microbatch_s[i]
        for k in range(i + 1, len(microbatch_s)):
            way_s += 2 * boundary_s[k - 1] + microbatch_s[k]
            period = max(period, boundary_s[k - 1], way_s / (in_flight[i] - in_flight[k] + 1))
    return period


def smallest_depths(*, microbatch_s: Sequence[float], boundary_s: Sequence[float], period_s: float) -> list[int]:
    """The smallest in-flight depth of every stage with which the steady period is at most ``period_s``.

        N_last = 1;  N_i = max(1, max_{k>i} ( ceil( (sum_{j=i..k} t_j + 2 sum_{j=i..k-1} c_j) / period ) - 1 + N_k ))

    The planner asks in its inner loops, so both sums are differences of running ones, and the lengths are taken as
    they are: one boundary less than stages.

    Raises:
        ScheduleError: one stage or boundary alone takes longer than ``period_s``.
    """
    slowest = max(*microbatch_s, *boundary_s, 0.0)
    if slowest > period_s * (1 + ROUNDING):
        raise ScheduleError(f"period {period_s:.6g} s: one stage or boundary alone takes {slowest:.6g} s; ask for that")
    starts = [0.0]
    for seconds, transfer in zip(microbatch_s, boundary_s, strict=False):
        starts.append(starts[-1] + seconds + 2 * transfer)
    ends = [start + seconds for start, seconds in zip(starts, microbatch_s, strict=True)]
    scale = (1 - ROUNDING) / period_s
    last = len(microbatch_s) - 1
    depths = [1] * len(microbatch_s)
    for i in range(last - 1, -1, -1):
        start = starts[i]
        deepest = 1
        for k in range(i + 1, last + 1):
            depth = depths[k] - 1 - int((start - ends[k]) * scale // 1)
            if depth > deepest:
                deepest = depth
        depths[i] = deepest
    return depths


def _check(microbatch_s: Sequence[float], boundary_s: Sequence[float], in_flight: Sequence[int]) -> None:
    if not microbatch_s or len(boundary_s) != len(microbatch_s) - 1 or len(in_flight) != len(microbatch_s):
        raise ScheduleError(
            f"{len(microbatch_s)} stages need {len(microbatch_s) - 1} boundaries and as many depths as stages, "
            f"got {len(boundary_s)} and {len(in_flight)}"
        )
    if min(in_flight) < 1 or any(after > here for here, after in pairwise(in_flight)):
        raise ScheduleError(f"in_flight must be at least 1 and not increase along the pipeline, got {list(in_flight)}")
