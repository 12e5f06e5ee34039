"""Times the parts of a repeated piece of work one by one: by the host's clock, or on a GPU by CUDA's events."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from hetero.profiling.compiled_shapes import num_compiled_graphs
from hetero.profiling.repetitions import LEAST, Repetitions

BATCH = 4
"""Repetitions that are launched on a GPU before anybody waits for it. The first of them is not counted: the device was
idle before it, as it never is in a running step."""

MOST_WARM_UPS = 8
"""Rounds of a warm-up: experts, which get other numbers of tokens in each, may compile in some of the first ones."""

Parts = Sequence[Callable[[], None]]


def time_parts(
    parts: Parts,
    *,
    device: torch.device,
    seconds: float,
    longest_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Repetitions] | None:
    """Run ``parts`` one after another, again and again for ``seconds``, and sum up what each of them took.

    Some rounds to warm up do not count: none in which torch.compile compiles something, nor the first one, in which
    libraries load kernels. Then :data:`.LEAST` rounds follow at least.

    Args:
        longest_s: that all of it may take; where the last round of the warm-up says that it would take longer, nothing
            more is run.

    Returns:
        by part; ``None`` if there was not the time.
    """
    began_s = clock()
    lap_s = _warm_up(parts, device, clock)
    if LEAST * lap_s > longest_s - (clock() - began_s):
        return None
    laps = _on_cuda(parts) if device.type == "cuda" else _on_host(parts, clock)
    end_s = clock() + seconds
    found: list[list[float]] = []
    while len(found) < LEAST or clock() < end_s:
        found += next(laps)
    return [Repetitions.of(each) for each in zip(*found, strict=True)]


def _warm_up(parts: Parts, device: torch.device, clock: Callable[[], float]) -> float:
    """Run rounds until one compiles nothing, and return what the last one took."""
    for number in range(MOST_WARM_UPS):
        num_graphs, start_s = num_compiled_graphs(), clock()
        for part in parts:
            part()
        _wait_for(device)
        is_cold = device.type == "cuda" and number == 0
        if num_compiled_graphs() == num_graphs and not is_cold:
            break
    return clock() - start_s


def _on_host(parts: Parts, clock: Callable[[], float]) -> Iterator[list[list[float]]]:
    while True:
        marks = [clock()]
        for part in parts:
            part()
            marks.append(clock())
        yield [[after - before for before, after in pairwise(marks)]]


def _on_cuda(parts: Parts) -> Iterator[list[list[float]]]:
    while True:
        batch = []
        for _ in range(BATCH):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
            events[0].record()
            for part, event in zip(parts, events[1:], strict=True):
                part()
                event.record()
            batch.append(events)
        torch.cuda.synchronize()
        yield [[before.elapsed_time(after) / 1e3 for before, after in pairwise(events)] for events in batch[1:]]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
