"""Microbatches on their way to the device: one step ahead, each once, in buffers that nobody overwrites too early."""

from collections.abc import Iterator

import pytest
import torch

from hetero.runtime.microbatch import DataPrefetcher, Microbatch, StagingBuffers

CPU = torch.device("cpu")


def step_of(number: int) -> list[Microbatch]:
    """Two microbatches whose tokens tell step and place."""
    return [Microbatch(*(torch.full((1, 4), 10 * number + place) for _ in range(4))) for place in range(2)]


def steps(read: list[int], count: int) -> Iterator[list[Microbatch]]:
    for number in range(count):
        read.append(number)
        yield step_of(number)


def tokens(batches: list[Microbatch]) -> list[int]:
    return [int(batch.tokens_BS[0, 0]) for batch in batches]


def test_every_step_is_given_once_and_in_order() -> None:
    read: list[int] = []
    data = DataPrefetcher(steps(read, 3), CPU)
    for number in range(3):
        assert tokens(data.take()) == [10 * number, 10 * number + 1]
        assert read == list(range(number + 1))
        data.fetch()
        data.fetch()
        assert read == list(range(min(number + 2, 3))), "one step ahead, and no more"
    with pytest.raises(StopIteration):
        data.take()


def test_a_buffer_stays_as_it_is_until_the_call_after_the_next() -> None:
    staging = StagingBuffers(pinned=False)
    first, second = staging.fill(step_of(1)), staging.fill(step_of(2))
    assert (tokens(first), tokens(second)) == ([10, 11], [20, 21])
    third = staging.fill(step_of(3))
    assert (tokens(third), tokens(second)) == ([30, 31], [20, 21])
    assert {t.data_ptr() for b in third for t in b.tensors} == {t.data_ptr() for b in first for t in b.tensors}
