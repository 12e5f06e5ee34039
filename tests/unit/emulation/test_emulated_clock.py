"""Emulated time follows the wall clock, and is ahead of nobody's deadline."""

import pytest

from hetero.emulation.cluster import emulated_clock
from hetero.emulation.cluster.emulated_clock import EmulatedClock

EPOCH = 100.0


class WallClock:
    """In place of the module ``time``: only sleeping takes time."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    made = WallClock(EPOCH)
    monkeypatch.setattr(emulated_clock, "time", made)
    return made


def test_advance_sleeps_until_the_deadline(wall: WallClock) -> None:
    clock = EmulatedClock(scale=0.1, epoch=EPOCH)
    clock.advance(0.5)
    assert clock.at_s == 0.5
    assert wall.slept_s == [pytest.approx(0.05)]
    assert clock.wall_s() == pytest.approx(0.5)


def test_the_work_of_an_operation_is_part_of_its_duration(wall: WallClock) -> None:
    clock = EmulatedClock(scale=2.0, epoch=EPOCH)
    clock.advance(1.0)
    wall.now_s += 1.5
    clock.advance(2.0)
    assert wall.slept_s == [pytest.approx(2.0), pytest.approx(0.5)]
    assert clock.lateness_s == pytest.approx(0.0)


def test_time_does_not_go_back(wall: WallClock) -> None:
    wall.now_s += 10
    clock = EmulatedClock(scale=1.0, epoch=EPOCH)
    clock.advance(5.0)
    clock.advance(3.0)
    assert clock.at_s == 5.0
    assert wall.slept_s == []


def test_lateness_is_what_the_wall_clock_is_behind(wall: WallClock) -> None:
    wall.now_s += 10
    clock = EmulatedClock(scale=2.0, epoch=EPOCH)
    clock.advance(1.0)
    assert clock.lateness_s == pytest.approx(4.0)


def test_sleeping_leaves_the_own_time_alone(wall: WallClock) -> None:
    clock = EmulatedClock(scale=0.01, epoch=EPOCH)
    clock.sleep_until(1.0)
    assert clock.at_s == 0.0
    assert wall.slept_s == [pytest.approx(0.01)]
    assert clock.wall_s() == pytest.approx(1.0)
