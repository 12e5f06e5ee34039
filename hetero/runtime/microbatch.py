"""Holds the tokens of one microbatch, and brings those of the next step to the device beside this one.

Tensor shapes: B samples of a microbatch on this rank, S the whole sequence.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hetero.errors import HeteroError
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import has_streams, stream_for
from hetero.runtime.host_copies import host_copies


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

    On CUDA those of the next step are copied while this one computes: from pinned memory, on a stream that waits for
    nothing, so that the host waits for no copy. Each step must have been waited for before the one after the next is
    fetched.

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
        self._stream = stream_for(device, StreamRole.READY_IN) if has_streams(device) else None
        self._staging = StagingBuffers(most_microbatches, device) if self._stream is not None else None
        self._copied: torch.cuda.Event | None = None
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
        if self._stream is not None:
            # What is copied to the device later, in the same stream, the compute need not wait for.
            self._copied = self._stream.record_event()

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
        if self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            for batch in batches:
                for tensor in batch.tensors:
                    tensor.record_stream(current)
        return batches


class StagingBuffers:
    """Keeps the microbatches of two steps in host memory for copies, all of it allocated before the first step.

    Nothing may be pinned in a step (:mod:`.pinned_memory`), so the first call allocates for the largest one.

    Args:
        most_microbatches: number of microbatches of the largest step, or 0 if no step has more than the first.
    """

    def __init__(self, most_microbatches: int, device: torch.device) -> None:
        self._most_microbatches = most_microbatches
        self._copies = host_copies(device)
        self._sets: list[list[Microbatch]] = []

    def fill(self, batches: Sequence[Microbatch]) -> list[Microbatch]:
        """Copies of ``batches``, which stay as they are until the call after the next."""
        if not self._sets:
            count = max(len(batches), self._most_microbatches)
            tensors = self._copies.to_keep_all(2 * count * batches[0].tensors)
            made = [Microbatch(*tensors[at : at + 4]) for at in range(0, len(tensors), 4)]
            self._sets = [made[:count], made[count:]]
        self._sets.reverse()
        buffers = self._sets[0][: len(batches)]
        for buffer, batch in zip(buffers, batches, strict=True):
            for target, source in zip(buffer.tensors, batch.tensors, strict=True):
                target.copy_(source)
        return buffers
