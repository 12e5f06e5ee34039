"""Copies between a device and its host, beside the computes: on CUDA in streams of their own, through pinned memory.

Where the device is the processor itself, gradients are copied as well, as the next step changes them, and weights are
written where they are read.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.errors import ConfigError


class Arrived(Protocol):
    """What was copied to the device is there, or will be for what comes later in the caller's stream."""

    def wait(self) -> object: ...


class HostCopies(Protocol):
    """Copies of one rank, each called in the thread that makes them."""

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that is copied to from the device, or stays."""

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        """Where weights of the host are written before they are copied to ``weights``: these themselves where the
        host can."""

    def behind(self) -> Callable[[], None]:
        """To be called where a copy is made that is to see what the caller has done so far."""

    def outwards(self) -> AbstractContextManager[object]:
        """Surrounds copies to the host, which are over behind it."""

    def inwards(self) -> AbstractContextManager[object]:
        """Surrounds copies to the device."""

    def beside(self) -> AbstractContextManager[object]:
        """Surrounds copies to the device and what the device does with them, beside its computes."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``, one of which is on the device."""

    def arrived(self) -> Arrived:
        """The copies to the device that were started before."""


def host_copies(device: torch.device) -> HostCopies:
    """Those of ``device``."""
    return _CudaCopies(device) if device.type == "cuda" else _ProcessorCopies()


@dataclass(frozen=True, slots=True)
class _There:
    """It is there already."""

    def wait(self) -> object:
        return None


class _ProcessorCopies:
    """Host and device are one."""

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(like, dtype=dtype, device="cpu")

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def behind(self) -> Callable[[], None]:
        return _at_once

    def outwards(self) -> AbstractContextManager[object]:
        return nullcontext()

    def inwards(self) -> AbstractContextManager[object]:
        return nullcontext()

    def beside(self) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def arrived(self) -> Arrived:
        return _There()


class _CudaCopies:
    """A stream out and one back. A copy out is waited for by its thread, a copy back by whoever reads the weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device)

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return _pinned(like.numel(), dtype)

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        return _pinned(weights.numel(), weights.dtype)

    def behind(self) -> Callable[[], None]:
        so_far = torch.cuda.current_stream(self._device).record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(so_far)

    def outwards(self) -> AbstractContextManager[object]:
        return _Outwards(self._out)

    def inwards(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._back)

    def beside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._beside)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def arrived(self) -> Arrived:
        return _Recorded(self._back.record_event(), self._device)


class _Outwards(AbstractContextManager[None]):
    """Runs in a stream, and waits for it in the end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
        self._stream.record_event().synchronize()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Copies to the device as far as an event."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> object:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return None


def _at_once() -> None:
    pass


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(numel, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise ConfigError(
            f"offload: {numel * dtype.itemsize / 2**20:,.0f} MiB of the host's memory cannot be pinned: {error}; raise "
            "the limit of locked memory (ulimit -l unlimited), give the host more memory, or leave less to it"
        ) from None
