"""Shares of the time, warm-ups and quartiles, by a clock that only calls advance."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetero.profiling.repetitions import LEAST, Repetitions, TimeBudget


class FakeClock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class TimedCall:
    """A call that takes so many seconds each time, the last number again and again."""

    def __init__(self, clock: FakeClock, *seconds: float) -> None:
        self.clock, self.seconds, self.count = clock, seconds, 0

    def __call__(self) -> None:
        self.clock.now_s += self.seconds[min(self.count, len(self.seconds) - 1)]
        self.count += 1


def test_the_first_call_warms_up_and_does_not_count() -> None:
    clock = FakeClock()
    found = TimeBudget(0.0, num_calls=1, clock=clock).measure(TimedCall(clock, 100.0, 1.0, 2.0, 3.0))
    assert found == Repetitions(median_s=2.0, spread=0.5, count=3)


def test_a_call_is_repeated_for_its_share() -> None:
    clock = FakeClock()
    call = TimedCall(clock, 1.0)
    assert TimeBudget(10.0, num_calls=1, clock=clock).measure(call) == Repetitions(1.0, 0.0, 9)
    assert call.count == 10, "one of which warmed up"


def test_what_one_call_leaves_or_overdraws_is_shared_by_those_behind_it() -> None:
    """Twelve seconds for four calls; the first takes eight for its three, so that the others have 4 / 3 each."""
    clock = FakeClock()
    budget = TimeBudget(12.0, num_calls=4, clock=clock)
    assert budget.measure(TimedCall(clock, 2.0)).count == LEAST
    counts = [budget.measure(TimedCall(clock, 0.125)).count for _ in range(3)]
    assert all(9 <= count <= 11 for count in counts)
    assert clock.now_s == pytest.approx(1012.0, abs=0.5)


def test_a_budget_that_is_overdrawn_still_measures() -> None:
    clock = FakeClock()
    budget = TimeBudget(1.0, num_calls=2, clock=clock)
    assert budget.measure(TimedCall(clock, 50.0)).count == LEAST
    assert budget.measure(TimedCall(clock, 50.0)).count == LEAST


@example([17.0, 1e-6, 1e-6], 3.0)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30), st.floats(0.001, 1000))
def test_a_spread_has_no_unit(seconds: list[float], factor: float) -> None:
    found, scaled = Repetitions.of(seconds), Repetitions.of([each * factor for each in seconds])
    assert min(seconds) <= found.median_s <= max(seconds)
    # A spread of millions, as of this example, has the rounding of millions.
    assert scaled.spread == pytest.approx(found.spread, rel=1e-12, abs=1e-9)
    assert found.count == len(seconds)


def test_one_repetition_far_off_moves_neither_median_nor_spread() -> None:
    assert Repetitions.of([1.0] * 9 + [50.0]) == Repetitions(1.0, 0.0, 10)
