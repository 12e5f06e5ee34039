"""The bytes that some work allocates: the most at a time, and those that are left."""

import torch

from hetero.profiling.stage_part import AllocatedBytes, allocated_bytes

CPU = torch.device("cpu")


def test_what_is_freed_counts_for_the_peak_alone() -> None:
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.ones(10))
        passing = torch.ones(100)
        kept.append(passing[:50].clone())

    assert allocated_bytes(work, CPU) == AllocatedBytes(peak=4 * 160, kept=4 * 60)


def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(1000)

    def work() -> None:
        before.add_(1).view(10, 100)

    assert allocated_bytes(work, CPU) == AllocatedBytes(peak=0, kept=0)
