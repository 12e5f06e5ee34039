"""The steady period: by hand, against the simulator, and the other way round from a period to depths."""

import math
import random

import pytest

from hetero.cost.network import TransferCost
from hetero.cost.pipeline_period import ROUNDING, smallest_depths, steady_period_s
from hetero.cost.simulation.engine import Pipeline, Replay
from hetero.errors import ScheduleError
from hetero.schedule.actions import ActionKind
from hetero.schedule.orders import one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early

WARM_UP = 60
"""Microbatches after which the start no longer shows."""


@pytest.mark.parametrize(
    ("microbatch_s", "boundary_s", "in_flight", "period_s"),
    [
        ([3.0], [], [1], 3.0),
        ([1.0, 1.0], [0.0], [2, 1], 1.0),  # plain 1F1B without transfers
        ([1.0, 1.0], [0.2], [2, 1], 1.2),  # (1 + 1 + 2 x 0.2) / 2: loses 1.2x to the link
        ([1.0, 1.0], [0.2], [3, 1], 1.0),  # one microbatch more hides it
        ([1.0, 1.0], [0.0], [1, 1], 2.0),  # one microbatch at a time
        ([1.0, 1.0], [5.0], [99, 1], 5.0),  # no depth hides a link that is slower than the stages
        ([1.0, 2.0, 1.0], [0.5, 0.5], [3, 2, 1], 2.0),
    ],
)
def test_by_hand(microbatch_s: list[float], boundary_s: list[float], in_flight: list[int], period_s: float) -> None:
    found = steady_period_s(microbatch_s=microbatch_s, boundary_s=boundary_s, in_flight=in_flight)
    assert found == pytest.approx(period_s)


def random_pipeline(rng: random.Random) -> tuple[list[float], list[float], list[int]]:
    """Stage seconds, boundary seconds, depths."""
    num_stages = rng.randint(1, 5)
    stages = [rng.choice([1.0, 2.0, rng.uniform(0.2, 5.0)]) for _ in range(num_stages)]
    boundaries = [rng.choice([0.0, 0.1, rng.uniform(0.0, 4.0)]) for _ in range(num_stages - 1)]
    depths = [1]
    for _ in range(num_stages - 1):
        depths.insert(0, depths[0] + rng.randint(0, 3))
    return stages, boundaries, depths


def simulated_period_s(
    stages: list[float], boundaries: list[float], depths: list[int], *, window: int, forward_share: list[float]
) -> float:
    """Seconds per microbatch between two of the first stage's backwards that are ``window`` apart."""
    counts = [WARM_UP + window + 2 * depths[0]] * len(stages)
    rows = add_communication(one_f_one_b(num_microbatches=counts, in_flight=depths), num_microbatches=counts)
    slices = tuple(({(0, 0): TransferCost(seconds=seconds, ports=(), num_bytes=0)},) for seconds in boundaries)
    pipeline = Pipeline(
        rows=post_receives_early(rows, computes_ahead=2),
        num_microbatches=tuple(counts),
        forward_s=tuple(t * share for t, share in zip(stages, forward_share, strict=True)),
        backward_s=tuple(t * (1 - share) for t, share in zip(stages, forward_share, strict=True)),
        forward=slices,
        backward=slices,
    )
    spans = Replay([pipeline]).spans()
    ends = [span.end_s for span in spans if span.kind == ActionKind.B and span.stage == 0]
    return (ends[WARM_UP + window] - ends[WARM_UP]) / window


@pytest.mark.rotates("parts")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_it_agrees_with_the_simulator_on_a_thousand_random_pipelines(seed: int) -> None:
    """100 of them per seed, to rounding: the steady state repeats exactly after as many microbatches as the cycle that
    sets the period holds."""
    rng = random.Random(seed)
    for _ in range(100):
        stages, boundaries, depths = random_pipeline(rng)
        period_s = steady_period_s(microbatch_s=stages, boundary_s=boundaries, in_flight=depths)
        window = critical_length(stages, boundaries, depths, period_s)
        share = [rng.uniform(0.1, 0.9) for _ in stages]
        found = simulated_period_s(stages, boundaries, depths, window=window, forward_share=share)
        assert found == pytest.approx(period_s, rel=1e-9), (stages, boundaries, depths)


def critical_length(stages: list[float], boundaries: list[float], depths: list[int], period_s: float) -> int:
    """A multiple of N_i - N_k + 1 of every cycle that takes the whole period."""
    length = 1
    for i in range(len(stages)):
        for k in range(i + 1, len(stages)):
            way_s = sum(stages[i : k + 1]) + 2 * sum(boundaries[i:k])
            microbatches = depths[i] - depths[k] + 1
            if way_s / microbatches == pytest.approx(period_s) and length % microbatches:
                length *= microbatches
    return length


@pytest.mark.parametrize("seed", range(20))
def test_smallest_depths_reach_the_period_and_none_is_too_deep(seed: int) -> None:
    rng = random.Random(seed)
    stages, boundaries, _ = random_pipeline(rng)
    period_s = max([*stages, *boundaries]) * rng.uniform(1.0, 2.0)
    depths = smallest_depths(microbatch_s=stages, boundary_s=boundaries, period_s=period_s)

    reached = steady_period_s(microbatch_s=stages, boundary_s=boundaries, in_flight=depths)
    assert reached <= period_s * (1 + 1e-6)
    for i, depth in enumerate(depths[:-1]):
        shallower = [*depths[:i], depth - 1, *depths[i + 1 :]]
        if depth - 1 >= depths[i + 1]:
            worse = steady_period_s(microbatch_s=stages, boundary_s=boundaries, in_flight=shallower)
            assert worse > period_s


def depths_by_the_formula(stages: list[float], boundaries: list[float], period_s: float) -> list[int]:
    """The smallest depths as their formula is written, every sum by itself."""
    depths = [1] * len(stages)
    for i in reversed(range(len(stages) - 1)):
        for k in range(i + 1, len(stages)):
            way_s = sum(stages[i : k + 1]) + 2 * sum(boundaries[i:k])
            depths[i] = max(depths[i], math.ceil(way_s / period_s * (1 - ROUNDING)) - 1 + depths[k])
    return depths


@pytest.mark.parametrize("seed", range(30))
def test_smallest_depths_are_those_of_the_formula(seed: int) -> None:
    rng = random.Random(seed)
    stages = [rng.uniform(0.5, 1.5) for _ in range(rng.randint(1, 7))]
    boundaries = [rng.choice([0.0, rng.uniform(0.0, 1.0)]) for _ in stages[1:]]
    for slack in (1.0, 1.1, 1.7, 4.0):
        period_s = slack * max(*stages, *boundaries, 0.0)
        found = smallest_depths(microbatch_s=stages, boundary_s=boundaries, period_s=period_s)
        assert found == depths_by_the_formula(stages, boundaries, period_s)


def test_equal_stages_without_transfers_need_what_1f1b_has() -> None:
    assert smallest_depths(microbatch_s=[1.0] * 4, boundary_s=[0.0] * 3, period_s=1.0) == [4, 3, 2, 1]


def test_equal_stages_with_transfers_as_long_as_they_need_three_each() -> None:
    assert smallest_depths(microbatch_s=[1.0] * 4, boundary_s=[1.0] * 3, period_s=1.0) == [10, 7, 4, 1]


@pytest.mark.parametrize("in_flight", [[1, 2], [1, 0]])
def test_depths_do_not_increase(in_flight: list[int]) -> None:
    with pytest.raises(ScheduleError, match="not increase along the pipeline"):
        steady_period_s(microbatch_s=[1.0, 1.0], boundary_s=[0.0], in_flight=in_flight)


def test_a_boundary_lies_between_two_stages() -> None:
    with pytest.raises(ScheduleError, match="2 stages need 1 boundaries"):
        steady_period_s(microbatch_s=[1.0, 1.0], boundary_s=[], in_flight=[1, 1])


def test_no_depth_beats_the_slowest_stage() -> None:
    with pytest.raises(ScheduleError, match="one stage or boundary alone takes 2 s"):
        smallest_depths(microbatch_s=[1.0, 2.0], boundary_s=[0.0], period_s=1.5)
