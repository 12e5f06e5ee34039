"""Rates of this host by few repetitions, and links from seconds."""

import itertools
import os

import pytest
import torch

from hetero.profiling import host_rates
from hetero.profiling.__main__ import _notes
from hetero.profiling.host_rates import (
    NUM_COPIES_OF_A_DEVICE,
    copy_link,
    measure_device_copies,
    measure_memory_copy,
    measure_updates,
    rounded,
    thread_counts,
)
from hetero.profiling.repetitions import LEAST, TimeBudget
from hetero.units import MIB


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed takes moments."""
    monkeypatch.setattr(host_rates, "UPDATE_NUMEL", 2**12)
    monkeypatch.setattr(host_rates, "COPY_BYTES", 2 * MIB)
    monkeypatch.setattr(host_rates, "COPY_CHUNK_BYTES", MIB // 4)
    monkeypatch.setattr(host_rates, "LINK_BYTES", (2**10, 2**12, 2**14))


@pytest.fixture
def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def ticking(num_calls: int) -> TimeBudget:
    """No time, of a clock that ticks once each time it is asked."""
    ticks = itertools.count(1)
    return TimeBudget(0.0, num_calls=num_calls, clock=lambda: float(next(ticks)))


@pytest.mark.parametrize(
    ("num_cores", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (96, [1, 2, 4, 8, 16, 32, 64, 96])],
)
def test_thread_counts(num_cores: int, counts: list[int]) -> None:
    assert thread_counts(num_cores) == counts


def test_updates_are_timed_with_each_number_of_threads(cores: list[int]) -> None:
    counts = thread_counts(len(cores))
    found = list(measure_updates(cores, ticking(len(counts))))
    assert [each.threads for each in found] == counts
    assert all(each.repetitions.count == LEAST for each in found)
    assert all(each.elements_per_s == 2**12 for each in found), "every repetition takes one tick"


def test_copies_in_memory_are_of_all_bytes(cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    zeros_like = torch.zeros_like

    def remember(*args: torch.Tensor) -> torch.Tensor:
        made.append(zeros_like(*args))
        return made[-1]

    monkeypatch.setattr(torch, "zeros_like", remember)
    assert measure_memory_copy(cores, ticking(1)).count == LEAST
    (target,) = made
    assert target.numel() == 2 * MIB
    assert target.eq(1).all()


def test_copies_to_a_device_and_back() -> None:
    """Here between two places of the same memory; every one takes one tick, which is the latency too."""
    to_device, to_host = measure_device_copies(torch.device("cpu"), ticking(NUM_COPIES_OF_A_DEVICE))
    assert to_device == to_host
    assert to_device.latency_us == 1e6


def test_a_link_predicts_the_seconds_it_was_made_of() -> None:
    seconds_of = {MIB: 60e-6, 16 * MIB: 700e-6, 128 * MIB: 5.4e-3}
    link = copy_link(10e-6, seconds_of)
    assert link.latency_us == 10
    for size, seconds in seconds_of.items():
        assert link.latency_us / 1e6 + size / link.bytes_per_s(size) == pytest.approx(seconds, rel=1e-3)


def test_sizes_that_are_all_latency_say_nothing_of_bandwidth() -> None:
    link = copy_link(50e-6, {MIB: 60e-6, 16 * MIB: 0.5e-3})
    assert link.bandwidth_gb_per_s == ((16 * MIB, rounded(16 * MIB / 0.45e-3 / 1e9)),)
    assert copy_link(50e-6, {MIB: 60e-6}).bandwidth_gb_per_s == ((MIB, rounded(MIB / 30e-6 / 1e9)),)


@pytest.mark.parametrize(("value", "said"), [(123456789.0, 123500000.0), (0.00123456, 0.001235), (0.0, 0.0)])
def test_figures_have_four_digits(value: float, said: float) -> None:
    assert rounded(value) == said


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (1.5, False), (1.7, True), (12.0, True)])
def test_a_busy_host_is_noted(load: float, is_busy: bool) -> None:
    """Whoever reads the file later has not seen the host."""
    notes = _notes(load, 8)
    assert [f"load {load:.1f}, 8 cores" in note for note in notes] == ([True] if is_busy else [])
