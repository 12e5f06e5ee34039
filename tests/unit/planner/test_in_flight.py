"""The least period keeps to the depths that memory holds."""

import random

import pytest

from hetero.cost.pipeline_period import smallest_depths, steady_period_s
from hetero.planner.replica.in_flight import least_period


def pipeline(seed: int) -> tuple[list[float], list[float], float]:
    """Seconds of stages and of transfers, some of which count, and of the slowest of all."""
    rng = random.Random(seed)
    times = [rng.uniform(0.5, 1.5) for _ in range(rng.randint(1, 7))]
    transfers = [rng.choice([0.0, rng.uniform(0.0, 1.0)]) for _ in times[1:]]
    return times, transfers, max(*times, *transfers, 0.0)


@pytest.mark.parametrize("seed", range(30))
def test_the_least_period_keeps_to_the_caps(seed: int) -> None:
    """And where these are deep enough it is that of the slowest stage or transfer."""
    times, transfers, slowest_s = pipeline(seed)
    deep = smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=slowest_s)
    assert least_period(times, transfers, deep, slowest_s)[0] == pytest.approx(slowest_s)
    rng = random.Random(seed)
    caps = [rng.randint(1, depth) for depth in deep]
    period_s, depths = least_period(times, transfers, caps, slowest_s)
    assert all(depth <= cap for depth, cap in zip(depths, caps, strict=True))
    assert period_s == pytest.approx(steady_period_s(microbatch_s=times, boundary_s=transfers, in_flight=depths))
    assert slowest_s <= period_s <= sum(times) + 2 * sum(transfers) + 1e-9
