"""Parts of a repetition are timed one by one, after a warm-up, by a clock that only they advance."""

import pytest
import torch

from hetero.profiling import laps
from hetero.profiling.laps import time_parts
from hetero.profiling.repetitions import LEAST, Repetitions
from tests.unit.profiling.test_repetitions import FakeClock, TimedCall

CPU = torch.device("cpu")


def test_each_part_has_its_own_seconds_and_the_warm_up_counts_for_none() -> None:
    clock = FakeClock()
    parts = [TimedCall(clock, 50.0, 1.0), TimedCall(clock, 90.0, 2.0)]
    found = time_parts(parts, device=CPU, seconds=30.0, longest_s=1e9, clock=clock)
    assert found == [Repetitions(1.0, 0.0, 10), Repetitions(2.0, 0.0, 10)]


def test_without_time_there_are_as_many_as_quartiles_need() -> None:
    clock = FakeClock()
    found = time_parts([TimedCall(clock, 1.0)], device=CPU, seconds=0.0, longest_s=4.0, clock=clock)
    assert found == [Repetitions(1.0, 0.0, LEAST)]


def test_rounds_that_compile_warm_up_and_say_nothing_of_a_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them here, as experts have; a lap takes a second, of the 5 that the 41 of compiling leave."""
    clock = FakeClock()
    call = TimedCall(clock, 20.0, 21.0, 1.0)
    monkeypatch.setattr(laps, "num_compiled_graphs", lambda: min(call.count, 2))
    found = time_parts([call], device=CPU, seconds=0.0, longest_s=46.0, clock=clock)
    assert found == [Repetitions(1.0, 0.0, LEAST)]
    assert call.count == 3 + LEAST


def test_what_compiles_again_and_again_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    call = TimedCall(clock, 1.0)
    monkeypatch.setattr(laps, "num_compiled_graphs", lambda: call.count)
    assert time_parts([call], device=CPU, seconds=0.0, longest_s=1e9, clock=clock) is not None
    assert call.count == laps.MOST_WARM_UPS + LEAST


@pytest.mark.parametrize("longest_s", [0.0, 3.9])
def test_what_would_take_too_long_stops_after_its_warm_up(longest_s: float) -> None:
    clock = FakeClock()
    call = TimedCall(clock, 1.0)
    assert time_parts([call], device=CPU, seconds=0.0, longest_s=longest_s, clock=clock) is None
    assert call.count == 1
