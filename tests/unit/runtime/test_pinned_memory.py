"""Pinned memory of the exact size, which is registered as long as anybody has a tensor in it."""

import mmap
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from hetero.errors import ConfigError
from hetero.runtime import pinned_memory
from hetero.runtime.pinned_memory import pinned_empty, pinned_like
from hetero.units import MIB
from tests.helpers.played_streams import PlayedCuda, played_cuda

CPU = torch.device("cpu")


@pytest.fixture
def played() -> Iterator[PlayedCuda]:
    with played_cuda() as cuda:
        yield cuda


def test_a_region_has_the_size_that_is_asked_for_to_a_page(played: PlayedCuda) -> None:
    """A power of two would be 32 MiB."""
    numel = 17 * MIB // 4 + 1
    tensor = pinned_empty(numel, torch.float32, CPU)
    assert (tensor.shape, tensor.dtype, tensor.data_ptr() % mmap.PAGESIZE) == ((numel,), torch.float32, 0)
    assert played.registered == {tensor.data_ptr(): 17 * MIB + mmap.PAGESIZE}
    assert not tensor.any()


def test_it_is_registered_as_long_as_a_tensor_shares_it(played: PlayedCuda) -> None:
    part = pinned_empty(3000, torch.float32, CPU)[1000:2000].view(20, 50)
    part.fill_(3)
    assert len(played.registered) == 1
    assert part.sum() == 3000
    del part
    assert not played.registered


def test_tensors_share_a_region(played: PlayedCuda) -> None:
    """Each begins at a line of the cache and has memory of its own; a tensor without elements has none."""
    like = [torch.zeros(3, 5), torch.zeros(7, dtype=torch.int64), torch.zeros(0), torch.zeros(2, 2, dtype=torch.uint8)]
    made = pinned_like(like, CPU)
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in like]
    assert list(played.registered.values()) == [mmap.PAGESIZE]
    for number, tensor in enumerate(made):
        tensor.fill_(number + 1)
        assert tensor.data_ptr() % 64 == 0
    assert [int(tensor.sum()) for tensor in made] == [15, 14, 0, 16]
    assert pinned_like([], CPU) == []


def test_nothing_is_given_back_while_the_device_is_busy(played: PlayedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure a receive may be pending for ever, and CUDA would wait for it."""
    monkeypatch.setattr(pinned_memory, "_KEPT", [])
    tensor = pinned_empty(10, torch.uint8, CPU)
    with mock.patch.object(torch.cuda, "default_stream") as default_stream:
        default_stream.return_value.query.return_value = False
        del tensor
    assert len(played.registered) == len(pinned_memory._KEPT) == 1


def test_memory_that_cannot_be_pinned_is_an_error_with_a_fix(played: PlayedCuda) -> None:
    with (
        mock.patch.object(PlayedCuda, "cudaHostRegister", return_value=2),
        pytest.raises(ConfigError) as refused,
    ):
        pinned_empty(17 * MIB, torch.uint8, CPU)
    assert str(refused.value) == (
        "pinned memory: 17 MiB of this host's memory cannot be pinned (out of memory); raise the limit of locked "
        "memory (ulimit -l unlimited), give the host more memory, or leave less to it"
    )
    with pytest.raises(ConfigError, match=r"cannot be pinned .*Cannot allocate memory"):
        pinned_empty(2**46, torch.uint8, CPU)
