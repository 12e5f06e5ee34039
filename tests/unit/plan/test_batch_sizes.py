"""How many samples each step takes: as megatron-core counts them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as megatrons

from hetero.plan.batch_sizes import BatchRampup, BatchSchedule, BatchSizes, VaryingBatch, by_flag
from hetero.serialization import from_json, to_json

GPT3_175B = 1536, BatchRampup(start=16, increment=16, samples=5_859_375)
"""Of Megatron-LM's own example."""

SHRINKS = BatchSchedule(seq_length=32, entries=((0, 8), (100, 2), (640, 12), (650, 4)))
"""Megatron-core lets a batch shrink as well; the third size begins at sample 20 and has no step, as the fourth does."""


def test_without_a_rampup_all_steps_are_alike() -> None:
    sizes = BatchSizes(8)
    assert [sizes.size(step) for step in (0, 1, 10**9)] == [8, 8, 8]
    assert [sizes.first_sample(step) for step in (0, 1, 10**9)] == [0, 8, 8 * 10**9]
    assert [sizes.num_steps(samples) for samples in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert sizes.smaller == ()


def their_rampup(full: int, rampup: BatchRampup) -> Callable[[int], int]:
    """The size of a step by the samples consumed, as megatron-core up to 0.17 has it, which dropped ramp-ups then."""
    if not hasattr(megatrons, "RampupBatchsizeNumMicroBatchesCalculator"):
        increments = (full - rampup.start) // rampup.increment
        return lambda consumed: min(
            full, rampup.start + rampup.increment * int(consumed / (rampup.samples / increments))
        )
    theirs = megatrons.RampupBatchsizeNumMicroBatchesCalculator(
        full, 1, 1, False, 1, rampup.start, rampup.increment, rampup.samples
    )

    def size(consumed: int) -> int:
        theirs.update(consumed, consistency_check=False)
        return int(theirs.get_current_global_batch_size())

    return size


def their_schedule(schedule: BatchSchedule) -> Callable[[int], int]:
    """The same of a schedule, as megatron-core from 0.18 on has it; before, by what its docstring says."""
    if not hasattr(megatrons, "StepBatchsizeNumMicroBatchesCalculator"):
        return lambda consumed: next(
            size for tokens, size in reversed(schedule.entries) if consumed >= tokens // schedule.seq_length
        )
    theirs = megatrons.StepBatchsizeNumMicroBatchesCalculator(
        1, 1, False, 1, str(schedule).strip("'"), schedule.seq_length
    )

    def size(consumed: int) -> int:
        theirs.update(consumed, consistency_check=False)
        return int(theirs.get_current_global_batch_size())

    return size


def assert_sizes_are(theirs: Callable[[int], int], full: int, varying: VaryingBatch, *, until: int) -> None:
    """Compare step by step until ``until`` samples are consumed, and the numbers of steps as well."""
    ours, consumed, step, seen = BatchSizes(full, varying), 0, 0, set()
    while consumed <= until:
        size = theirs(consumed)
        assert (ours.first_sample(step), ours.size(step)) == (consumed, size)
        assert ours.num_steps(consumed) == step
        assert ours.num_steps(consumed + size - 1) == step
        seen.add(size)
        consumed, step = consumed + size, step + 1
    assert ours.smaller == tuple(sorted(seen - {full}))


@pytest.mark.parametrize(
    ("full", "rampup"),
    [
        (12, BatchRampup(start=4, increment=4, samples=20)),
        (12, BatchRampup(start=1, increment=1, samples=100)),
        (64, BatchRampup(start=4, increment=12, samples=97)),
        # Sizes are left out where a step is longer than the samples of an increment.
        (100, BatchRampup(start=50, increment=1, samples=60)),
        GPT3_175B,
    ],
    ids=str,
)
def test_sizes_are_megatron_cores(full: int, rampup: BatchRampup) -> None:
    assert_sizes_are(their_rampup(full, rampup), full, rampup, until=rampup.samples + 2 * full)


@given(
    seq_length=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    odd=st.integers(0, 39),
)
def test_a_schedule_is_megatron_cores(seq_length: int, sizes: list[int], gaps: list[int], odd: int) -> None:
    samples = [sum(gaps[:i]) for i in range(len(sizes))]
    tokens = [sample * seq_length + (odd % seq_length if sample else 0) for sample in samples]
    schedule = BatchSchedule(seq_length=seq_length, entries=tuple(zip(tokens, sizes, strict=True)))
    assert_sizes_are(their_schedule(schedule), schedule.largest, schedule, until=samples[-1] + 3 * max(sizes))


def test_a_schedule_may_shrink_the_batch() -> None:
    sizes = BatchSizes(SHRINKS.largest, SHRINKS)
    assert [sizes.size(step) for step in range(12)] == [8, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4]
    assert sizes.smaller == (2, 4, 8)


def test_both_are_read_back_as_what_they_are() -> None:
    """A checkpoint has one field for both."""
    for varying in (GPT3_175B[1], SHRINKS):
        assert from_json(type(varying), to_json(varying), source="test") == varying
        assert {flag for flag, value in by_flag(varying).items() if value is not None} == {varying.flag}
    assert by_flag(None) == {"--step-batch-size-schedule": None, "--rampup-batch-size": None}
