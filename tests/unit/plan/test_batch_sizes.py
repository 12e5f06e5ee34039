"""How many samples each step takes: as megatron-core counts them."""

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from hetero.plan.batch_sizes import BatchRampup, BatchSizes

GPT3_175B = 1536, BatchRampup(start=16, increment=16, samples=5_859_375)
"""Of Megatron-LM's own example."""


def test_without_a_rampup_all_steps_are_alike() -> None:
    sizes = BatchSizes(8)
    assert [sizes.size(step) for step in (0, 1, 10**9)] == [8, 8, 8]
    assert [sizes.first_sample(step) for step in (0, 1, 10**9)] == [0, 8, 8 * 10**9]
    assert [sizes.num_steps(samples) for samples in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert sizes.smaller == ()


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
    """Step by step until two steps behind the ramp-up, and the number of steps in so many samples."""
    theirs = RampupBatchsizeNumMicroBatchesCalculator(
        full, 1, 1, False, 1, rampup.start, rampup.increment, rampup.samples
    )
    ours, consumed, step, seen = BatchSizes(full, rampup), 0, 0, set()
    while consumed <= rampup.samples + 2 * full:
        theirs.update(consumed, consistency_check=False)
        size = theirs.get_current_global_batch_size()
        assert (ours.first_sample(step), ours.size(step)) == (consumed, size)
        assert ours.num_steps(consumed) == step
        assert ours.num_steps(consumed + size - 1) == step
        seen.add(size)
        consumed, step = consumed + size, step + 1
    assert ours.smaller == tuple(sorted(seen - {full}))
