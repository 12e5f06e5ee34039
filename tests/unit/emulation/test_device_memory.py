"""An emulated device runs out of memory at the microbatch at which the described one would."""

import re

import pytest

from hetero.cost.stage_memory import MemoryBreakdown, StageMemory
from hetero.emulation.cluster.device_memory import DeviceMemory
from hetero.errors import DeviceMemoryError
from hetero.schedule.actions import Action, parse_row
from hetero.schedule.activation_residency import Residency
from hetero.units import GIB

PEAK = MemoryBreakdown(
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
    held_by_collectives=0,
    slack=0,
)
"""At three microbatches of 2 GiB each: 10 GiB beside them."""


STAGE = StageMemory(
    fixed=PEAK,
    activations_per_microbatch=2 * GIB,
    logits_per_microbatch=0,
    input_per_microbatch=GIB // 2,
    deferred_per_microbatch=GIB,
    allocator_slack=0.0,
)


def device(capacity_gib: int | None, *, row: str = "", stages: dict[int, StageMemory] | None = None) -> DeviceMemory:
    """``row`` names the microbatches that are run again."""
    return DeviceMemory(
        "rank 1",
        peak=PEAK,
        stages=stages or {0: STAGE},
        residency=Residency.of_row(parse_row(row)),
        capacity_bytes=None if capacity_gib is None else capacity_gib * GIB,
    )


def run(memory: DeviceMemory, row: str) -> None:
    for action in parse_row(row):
        memory.before(action)
        memory.after(action)


def test_the_microbatch_that_is_too_many() -> None:
    memory = device(15)
    run(memory, "0F0 0F1")
    expected = (
        "rank 1: out of memory in the forward of microbatch 2: it needs 16.00 GiB (weights 2.00, gradients 2.00, "
    )
    with pytest.raises(DeviceMemoryError, match=re.escape(expected)):
        memory.before(Action.parse("0F2"))


def test_a_backward_makes_room() -> None:
    memory = device(14)
    for number in range(5):
        run(memory, f"0F{number} 0B{number}")


def test_what_a_split_backward_defers_counts_until_its_weights_gradients() -> None:
    """12 GiB with one in flight; 1 GiB for each that waits."""
    memory = device(13)
    run(memory, "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0F3 0I3")
    with pytest.raises(DeviceMemoryError, match=r"forward of microbatch 4: it needs 14.00 GiB .*deferred of 2 2.00"):
        memory.before(Action.parse("0F4"))


def test_a_device_of_unknown_memory_never_runs_out() -> None:
    memory = device(None)
    for number in range(100):
        memory.before(Action(0, Action.parse("0F0").kind, number))


def test_all_stages_of_a_device_count_together() -> None:
    """Two microbatches of one stage and two of another are as many as four of either."""
    memory = device(17, stages={0: STAGE, 2: STAGE})
    run(memory, "0F0 0F1 2F0")
    expected = r"forward of microbatch 1 on stage 2: it needs 18.00 GiB .*activations of 4 in flight 8.00"
    with pytest.raises(DeviceMemoryError, match=expected):
        memory.before(Action.parse("2F1"))
    memory = device(17, stages={0: STAGE, 2: STAGE})
    run(memory, "0F0 0F1 2F0 2B0 2F1")


def test_a_microbatch_that_is_run_again_counts_with_its_input_until_then() -> None:
    """10 GiB and half of one for each input; the second forward makes 2 GiB of it."""
    row = "0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0"
    run(device(13, row=row), row)
    memory = device(12, row=row)
    run(memory, "0F0 0F1 0F2")
    expected = r"second forward of microbatch 2: it needs 13.00 GiB .*of 1 in flight 2.00, inputs of 2 1.00"
    with pytest.raises(DeviceMemoryError, match=expected):
        memory.before(Action.parse("0R2"))
