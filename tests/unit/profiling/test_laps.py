"""Parts of a repetition are timed one by one, after a warm-up, by a clock that only they advance."""

import pytest
import torch

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


@pytest.mark.parametrize("longest_s", [0.0, 3.9])
def test_what_would_take_too_long_stops_after_its_warm_up(longest_s: float) -> None:
    clock = FakeClock()
    call = TimedCall(clock, 1.0)
    assert time_parts([call], device=CPU, seconds=0.0, longest_s=longest_s, clock=clock) is None
    assert call.count == 1
