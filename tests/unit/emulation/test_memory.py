"""An emulated device runs out of memory at the microbatch at which the described one would."""

import re

import pytest

from hetero.cost.memory import MemoryParts
from hetero.emulation.memory import DeviceMemory
from hetero.errors import DeviceMemoryError
from hetero.schedule.actions import Kind
from hetero.units import GIB

PEAK = MemoryParts(
    weights=2 * GIB,
    gradients=2 * GIB,
    optimizer=4 * GIB,
    activations=6 * GIB,
    logits=0,
    deferred=0,
    working=GIB,
    boundary_buffers=0,
    sync_buffers=0,
    context=GIB,
    communicators=0,
    slack=0,
)
"""At three microbatches of 2 GiB each: 10 GiB beside them."""


def device(capacity_gib: int | None) -> DeviceMemory:
    capacity = None if capacity_gib is None else capacity_gib * GIB
    return DeviceMemory("rank 1", peak=PEAK, deepest=3, capacity_bytes=capacity)


def test_the_microbatch_that_is_too_many() -> None:
    memory = device(15)
    memory.before(Kind.F, 0)
    memory.before(Kind.F, 1)
    expected = (
        "rank 1: out of memory in the forward of microbatch 2: it needs 16.00 GiB (weights 2.00, gradients 2.00, "
    )
    with pytest.raises(DeviceMemoryError, match=re.escape(expected)):
        memory.before(Kind.F, 2)


def test_a_backward_makes_room() -> None:
    memory = device(14)
    for number in range(5):
        memory.before(Kind.F, number)
        memory.after(Kind.F)
        memory.before(Kind.B, number)
        memory.after(Kind.B)


def test_what_a_split_backward_defers_counts_until_its_weights_gradients() -> None:
    """12 GiB with one in flight; 1 GiB for each that waits."""
    memory = DeviceMemory("rank 1", peak=PEAK, deepest=3, capacity_bytes=13 * GIB, deferred_bytes=GIB)
    for number in range(5):
        memory.before(Kind.F, number)
        memory.before(Kind.B, number)
        memory.after(Kind.B)
        if number > 0:
            memory.before(Kind.W, number - 1)
            memory.after(Kind.W)
    memory.before(Kind.F, 5)
    memory.after(Kind.B)
    with pytest.raises(DeviceMemoryError, match=r"forward of microbatch 6: it needs 14.00 GiB .*deferred of 2 2.00"):
        memory.before(Kind.F, 6)


def test_a_device_of_unknown_memory_never_runs_out() -> None:
    memory = device(None)
    for number in range(100):
        memory.before(Kind.F, number)
