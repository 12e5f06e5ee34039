"""Emulated time follows the wall clock, and is ahead of nobody's deadline."""

import time

import pytest

from hetero.emulation.cluster.emulated_clock import EmulatedClock


def test_advance_sleeps_until_the_deadline() -> None:
    clock = EmulatedClock(scale=0.1, epoch=time.monotonic())
    clock.advance(0.5)
    assert clock.at_s == 0.5
    assert clock.wall_s() >= 0.5


def test_time_does_not_go_back() -> None:
    clock = EmulatedClock(scale=1.0, epoch=time.monotonic() - 10)
    clock.advance(5.0)
    clock.advance(3.0)
    assert clock.at_s == 5.0


def test_lateness_is_what_the_wall_clock_is_behind() -> None:
    clock = EmulatedClock(scale=2.0, epoch=time.monotonic() - 10)
    clock.advance(1.0)
    assert clock.lateness_s == pytest.approx(4.0, abs=0.5)


def test_sleeping_leaves_the_own_time_alone() -> None:
    clock = EmulatedClock(scale=0.01, epoch=time.monotonic())
    clock.sleep_until(1.0)
    assert clock.at_s == 0.0
    assert clock.wall_s() >= 1.0
