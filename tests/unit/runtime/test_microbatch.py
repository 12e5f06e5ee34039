"""Microbatches on their way to the device: one step ahead, each once, in buffers that nobody overwrites too early."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch

from hetero.errors import ConfigError
from hetero.runtime import device_streams, host_copies
from hetero.runtime.microbatch import DataPrefetcher, Microbatch, StagingBuffers

CPU = torch.device("cpu")


def step_of(number: int, *, count: int = 2) -> list[Microbatch]:
    """Microbatches whose tokens tell step and place."""
    return [Microbatch(*(torch.full((1, 4), 10 * number + place) for _ in range(4))) for place in range(count)]


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


def test_an_error_is_raised_by_the_step_that_it_belongs_to() -> None:
    """The step before has its data, and may be finished and saved."""

    def one_step() -> Iterator[list[Microbatch]]:
        yield step_of(0)
        raise ConfigError("sample 2 is wrong")

    data = DataPrefetcher(one_step(), CPU)
    assert tokens(data.take()) == [0, 1]
    data.fetch()
    assert str(data.error) == "sample 2 is wrong"
    for _ in range(2):
        with pytest.raises(ConfigError, match="sample 2 is wrong"):
            data.take()


def test_a_buffer_stays_as_it_is_until_the_call_after_the_next() -> None:
    staging = StagingBuffers(0, CPU)
    first, second = staging.fill(step_of(1)), staging.fill(step_of(2))
    assert (tokens(first), tokens(second)) == ([10, 11], [20, 21])
    third = staging.fill(step_of(3))
    assert (tokens(third), tokens(second)) == ([30, 31], [20, 21])
    assert {t.data_ptr() for b in third for t in b.tensors} == {t.data_ptr() for b in first for t in b.tensors}


def test_the_first_step_allocates_for_the_largest() -> None:
    """A later, larger step uses the same memory, and a smaller one a part of it."""
    staging = StagingBuffers(3, CPU)
    addresses = [addresses_of(staging.fill(step_of(number, count=count))) for number, count in enumerate((1, 3, 2, 3))]
    assert [len(each) for each in addresses] == [4, 12, 8, 12]
    assert addresses[0] < addresses[2], "the first set of buffers"
    assert addresses[1] == addresses[3], "the second one"


def addresses_of(batches: list[Microbatch]) -> set[int]:
    return {tensor.data_ptr() for batch in batches for tensor in batch.tensors}


class CudaCopies:
    """Plays CUDA for copies to it, and notes what is asked of whom, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.on = "compute"

        def allocate(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
            self.calls.append(f"pin {len(tensors)} for {device}")
            return [torch.empty_like(tensor) for tensor in tensors]

        def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
            waits = "" if non_blocking else ", and the host waits"
            self.calls.append(f"{self.on}: copy to {device}{waits}")
            return tensor.clone()

        copies = mock.Mock()
        copies.record_event.return_value = "these copies"
        device_streams._make_stream.cache_clear()
        monkeypatch.setattr(host_copies, "pinned_like", allocate)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: copies)
        monkeypatch.setattr(torch.cuda, "stream", self._under)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, on: self.calls.append(f"{on.on}: keep"))

    @contextlib.contextmanager
    def _under(self, stream: object) -> Iterator[None]:
        self.on = "copies"
        yield
        self.on = "compute"

    def wait_event(self, event: str) -> None:
        self.calls.append(f"{self.on}: wait for {event}")


def test_on_cuda_no_host_waits_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are asynchronous because they come from pinned memory, on a stream that compute waits for."""
    cuda = CudaCopies(monkeypatch)
    data = DataPrefetcher(steps([], 3), torch.device("cuda", 0))
    data.fetch()
    # Two microbatches of four tensors: memory for two steps, then the copies of one.
    assert cuda.calls == ["pin 16 for cuda:0"] + 8 * ["copies: copy to cuda:0"]
    for number in range(3):
        cuda.calls.clear()
        assert tokens(data.take()) == [10 * number, 10 * number + 1]
        assert cuda.calls == ["compute: wait for these copies"] + 8 * ["compute: keep"]
        cuda.calls.clear()
        data.fetch()
        assert cuda.calls == (8 * ["copies: copy to cuda:0"] if number < 2 else [])
    device_streams._make_stream.cache_clear()
