"""What counts as a rank's own computing in a step, on a clock that the test moves."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetero.distributed.timing import Waitable
from hetero.runtime.compute_seconds import ComputeSeconds, HostClock, StreamClock, compute_seconds
from hetero.schedule.actions import UPDATE, Action, ActionKind

FORWARD, BACKWARD = Action(ActionKind.F, 0, 0), Action(ActionKind.B, 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self, mark: float) -> None:
        assert mark <= self.now_s

    def forget(self) -> None:
        pass


class Gather:
    """Weights that take some time to come."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock.now_s += self._seconds

    def is_completed(self) -> bool:
        return False


def gather(timing: ComputeSeconds, work: Waitable) -> Waitable:
    nothing = cast("Any", None)
    (found,) = timing.collective(nothing, "all_gather", nothing, lambda: [work])
    return found


def test_forwards_and_backwards_add_up_and_what_lies_between_does_not() -> None:
    clock = Clock()
    timing = ComputeSeconds(clock)
    for action, seconds in ((FORWARD, 2.0), (BACKWARD, 3.0), (FORWARD, 2.0), (UPDATE, 50.0)):
        clock.now_s += 10.0
        with timing.compute(action):
            clock.now_s += seconds
    assert timing.end_step() == 7.0
    assert timing.end_step() == 0.0


def test_weights_that_a_forward_waits_for_do_not_count() -> None:
    clock = Clock()
    timing = ComputeSeconds(clock)
    late, later = (gather(timing, Gather(clock, seconds)) for seconds in (5.0, 7.0))
    with timing.compute(FORWARD):
        clock.now_s += 1.0
        late.wait()
        clock.now_s += 2.0
    later.wait()
    assert not late.is_completed()
    assert timing.end_step() == 3.0


def test_where_the_seconds_of_a_step_go() -> None:
    """From its begin to its last backward, to what all agree on, and through the update; then nothing any more."""
    clock = Clock()
    timing = ComputeSeconds(clock, always=False)
    with timing.compute(FORWARD):
        clock.now_s += 9.0
    assert timing.end_step() == 0.0, "nobody has asked for it"
    assert timing.times() is None
    timing.begin_step()
    late = gather(timing, Gather(clock, 5.0))
    for action in (FORWARD, BACKWARD):
        clock.now_s += 1.0
        with timing.compute(action):
            clock.now_s += 2.0
            late.wait()
    with timing.outside_steps():
        timing.meet()
    assert timing.times() is None, "an evaluation is no end of a step"
    clock.now_s += 3.0
    timing.meet()
    with timing.compute(UPDATE):
        clock.now_s += 4.0
    times = timing.times()
    assert times == (0.0, 16.0, 19.0, 4.0, 4.0, 0.0)
    assert times == timing.times()
    timing.end_step()
    assert timing.times() is None


def test_evaluations_do_not_count() -> None:
    clock = Clock()
    timing = ComputeSeconds(clock)
    with timing.outside_steps(), timing.compute(FORWARD):
        clock.now_s += 4.0
    with timing.compute(FORWARD):
        clock.now_s += 1.0
    assert timing.end_step() == 1.0


def test_a_clock_of_the_host_goes_on() -> None:
    clock = HostClock()
    begin = clock.mark()
    assert clock.seconds(begin, clock.mark()) >= 0.0
    assert isinstance(compute_seconds(torch.device("cpu"))._clock, HostClock)


def test_a_clock_of_a_stream_makes_no_more_events_than_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA played: an event stands for the milliseconds at which it was recorded last."""
    made, milliseconds = [], itertools.count(step=250)

    def event(*, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        new = SimpleNamespace(at=0)
        new.record = lambda: setattr(new, "at", next(milliseconds))
        new.elapsed_time = lambda end: end.at - new.at
        made.append(new)
        return new

    monkeypatch.setattr(torch.cuda, "Event", event)
    timing = ComputeSeconds(StreamClock())
    for _ in range(3):
        for _ in range(4):
            with timing.compute(FORWARD):
                pass
        assert timing.end_step() == 1.0
    assert len(made) == 8
    assert isinstance(compute_seconds(torch.device("cuda"))._clock, StreamClock)
