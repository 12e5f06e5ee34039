"""Measures the rates of a host: AdamW's updates by threads, copies inside its memory, copies to and from a device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hetero.profiling.figures import rounded
from hetero.profiling.repetitions import Repetitions, TimeBudget
from hetero.runtime.host_adamw import BoundThreads, HostAdamW, HostUpdate
from hetero.runtime.pinned_memory import pinned_empty
from hetero.spec.link import Link
from hetero.units import GB, MIB, US_PER_S

UPDATE_NUMEL = 2**24
"""Parameters of a timed update: 288 MiB with their state, more than the cache of most processors."""

UPDATE = HostUpdate(number=1000, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, factor=0.5)
"""A step of a clipped training; what it takes does not depend on the numbers, but for the product with the factor."""

COPY_BYTES = 256 * MIB
"""Of a timed copy inside the host's memory."""

COPY_CHUNK_BYTES = 4 * MIB

LATENCY_BYTES = 4

LINK_BYTES = (MIB, 16 * MIB, 128 * MIB)
"""Of timed copies to and from a device, beside one of :data:`LATENCY_BYTES`."""

NUM_COPIES_OF_A_DEVICE = 2 * (1 + len(LINK_BYTES))


@dataclass(frozen=True, slots=True)
class MeasuredUpdates:
    """Updates of :data:`UPDATE_NUMEL` parameters with so many threads."""

    threads: int
    repetitions: Repetitions

    @property
    def elements_per_s(self) -> float:
        return UPDATE_NUMEL / self.repetitions.median_s


def thread_counts(num_cores: int) -> list[int]:
    """The numbers of threads that are measured: powers of two, and all cores."""
    powers = [2**power for power in range(num_cores.bit_length())]
    return sorted({*powers, num_cores})


def measure_updates(cores: Sequence[int], budget: TimeBudget) -> Iterator[MeasuredUpdates]:
    """Time updates with each of :func:`thread_counts`; one call of ``budget`` each.

    The state is in fp32, weights leave in bf16. Threads are bound to the first of ``cores``.
    """
    main = torch.full((UPDATE_NUMEL,), 0.01)
    gradients = torch.full((UPDATE_NUMEL,), 0.001)
    weights = torch.empty(UPDATE_NUMEL, dtype=torch.bfloat16)
    for num_threads in thread_counts(len(cores)):
        with BoundThreads(cores[:num_threads]) as threads:
            repetitions = budget.measure(partial(_update, HostAdamW(main, threads), gradients, weights))
        yield MeasuredUpdates(num_threads, repetitions)


def measure_memory_copy(cores: Sequence[int], budget: TimeBudget) -> Repetitions:
    """Time copies of :data:`COPY_BYTES` by a thread on each of ``cores``; one call of ``budget``."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy_chunk(number: int) -> None:
        part = slice(number * COPY_CHUNK_BYTES, (number + 1) * COPY_CHUNK_BYTES)
        target[part].copy_(source[part])

    with BoundThreads(cores) as threads:
        return budget.measure(lambda: threads.run(copy_chunk, count=COPY_BYTES // COPY_CHUNK_BYTES))


def measure_device_copies(device: torch.device, budget: TimeBudget) -> tuple[Link, Link]:
    """Time copies from the host's pinned memory to ``device`` and back; :data:`NUM_COPIES_OF_A_DEVICE` of ``budget``.

    Raises:
        ConfigError: the memory cannot be pinned.
    """
    num_bytes = max(LINK_BYTES)
    is_cuda = device.type == "cuda"
    on_host = pinned_empty(num_bytes, torch.uint8, device) if is_cuda else torch.zeros(num_bytes, dtype=torch.uint8)
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def link(source: torch.Tensor, target: torch.Tensor) -> Link:
        def copy_of(size: int) -> Callable[[], None]:
            def copy() -> None:
                target[:size].copy_(source[:size], non_blocking=True)
                if is_cuda:
                    torch.cuda.synchronize(device)

            return copy

        latency = budget.measure(copy_of(LATENCY_BYTES))
        return copy_link(latency.median_s, {size: budget.measure(copy_of(size)).median_s for size in LINK_BYTES})

    return link(on_host, on_device), link(on_device, on_host)


def copy_link(latency_s: float, seconds_of: Mapping[int, float]) -> Link:
    """The link of copies whose smallest one took ``latency_s``, and others by their bytes ``seconds_of``.

    A link's latency is added to every message, so that it is no part of what its bytes take. A size of which it is
    more than half says little about bandwidth and is left out, but for the largest one.
    """
    largest = max(seconds_of)
    table = tuple(
        (size, rounded(size / max(seconds - latency_s, seconds / 2) / GB))
        for size, seconds in sorted(seconds_of.items())
        if seconds > 2 * latency_s or size == largest
    )
    return Link(bandwidth_gb_per_s=table, latency_us=rounded(latency_s * US_PER_S))


def _update(optimizer: HostAdamW, gradients: torch.Tensor, weights: torch.Tensor) -> None:
    optimizer.commit(gradients, UPDATE, weights=weights)
