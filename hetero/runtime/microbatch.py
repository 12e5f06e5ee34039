"""Holds the tokens of one microbatch, and brings those of the next step to the device beside this one.

Tensor shapes: B samples of a microbatch on this rank, S the whole sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hetero.errors import HeteroError


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What a first or last stage reads: int64 ids, and 1.0 where a token's loss counts."""

    tokens_BS: torch.Tensor
    position_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        """What ``function`` makes of each tensor."""
        return Microbatch(
            tokens_BS=function(self.tokens_BS),
            position_ids_BS=function(self.position_ids_BS),
            labels_BS=function(self.labels_BS),
            loss_mask_BS=function(self.loss_mask_BS),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All four, in one order."""
        return self.tokens_BS, self.position_ids_BS, self.labels_BS, self.loss_mask_BS


class DataPrefetcher:
    """Gives a rank its microbatches on its device, those of one step at a time.

    On CUDA a step's are copied beside the compute of the one before: from pinned memory, on a stream of their own, so
    that the host waits for no copy. Each step must have been waited for before the one after the next is fetched.

    Args:
        data: microbatches in the memory of the host, of one step after the other, all of the same shapes.
        most_microbatches: number of microbatches of the largest step, where the first one may have fewer.

    Attributes:
        error: why the next step's could not be read, ``None`` if they could.
    """

    def __init__(
        self, data: Iterator[Sequence[Microbatch]], device: torch.device, *, most_microbatches: int = 0
    ) -> None:
        self._data = data
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging = StagingBuffers(most_microbatches, pinned=True) if self._stream is not None else None
        self._next: list[Microbatch] | None = None
        self.error: HeteroError | None = None

    def fetch(self) -> None:
        """Read the next step's microbatches and start copying them, unless they are there or the data is at its end.

        What is wrong with them is raised where they are taken: the step before does not need them.
        """
        if self._next is not None or self.error is not None:
            return
        try:
            batches = next(self._data, None)
        except HeteroError as error:
            self.error = error
            return
        if batches is None:
            return
        if self._staging is not None:
            batches = self._staging.fill(batches)
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            self._next = [batch.map(lambda tensor: tensor.to(self._device, non_blocking=True)) for batch in batches]

    def take(self) -> list[Microbatch]:
        """The next step's microbatches; what the current stream does from here on finds them there.

        Raises:
            StopIteration: there are no more.
            HeteroError: reading them failed.
        """
        self.fetch()
        if self.error is not None:
            raise self.error
        if self._next is None:
            raise StopIteration
        batches, self._next = self._next, None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for batch in batches:
                for tensor in batch.tensors:
                    tensor.record_stream(current)
        return batches


class StagingBuffers:
    """Keeps the microbatches of two steps in host memory that is allocated once, before anything runs on the device.

    To allocate pinned memory may synchronise the device, as may whoever pins batch by batch in the middle of a step,
    while a receive holds the device until its message comes. So the first call allocates for the largest step.

    Args:
        most_microbatches: number of microbatches of the largest step, or 0 if no step has more than the first.
    """

    def __init__(self, most_microbatches: int = 0, *, pinned: bool) -> None:
        self._most_microbatches = most_microbatches
        self._pinned = pinned
        self._sets: list[list[Microbatch]] = []

    def fill(self, batches: Sequence[Microbatch]) -> list[Microbatch]:
        """Copies of ``batches``, which stay as they are until the call after the next."""
        if not self._sets:
            count = max(len(batches), self._most_microbatches)
            self._sets = [[batches[0].map(self._empty_like) for _ in range(count)] for _ in range(2)]
        self._sets.reverse()
        buffers = self._sets[0][: len(batches)]
        for buffer, batch in zip(buffers, batches, strict=True):
            for target, source in zip(buffer.tensors, batch.tensors, strict=True):
                target.copy_(source)
        return buffers

    def _empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
