"""Copies between a device and its host while the device computes: on CUDA in streams by role, through pinned memory.

Where the device is the processor itself, gradients are copied as well, as the next step changes them, and weights are
written where they are read.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import has_streams, stream_for
from hetero.runtime.pinned_memory import pinned_empty, pinned_like


class Arrived(Protocol):
    """What was copied to the device is there, or will be for what comes later in the caller's stream."""

    def wait(self) -> object: ...


class HostCopies(Protocol):
    """Copies of one rank, each called in the thread that makes them."""

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host for copies from the device and to it, of the shape of ``like``."""

    def to_keep_all(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return such memory for several tensors at once, of their shapes and dtypes."""

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        """Where weights of the host are written before they are copied to ``weights``: these themselves where the
        host can."""

    def mark_computed(self) -> Callable[[], None]:
        """Return what is to be called before copies that need what the caller has issued so far."""

    def wait_until_computed(self) -> None:
        """Come back when the device has done what the caller has issued so far."""

    def within(self, role: StreamRole) -> AbstractContextManager[object]:
        """Surrounds copies to the device, and what the device does with them while it computes."""

    def outwards(self, role: StreamRole) -> AbstractContextManager[object]:
        """Surrounds copies to the host, which are over at its end."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``, one of which is on the device."""

    def arrived(self, role: StreamRole) -> Arrived:
        """Return the copies to the device that were started in this role so far."""


def host_copies(device: torch.device) -> HostCopies:
    """Return what copies between ``device`` and its host. All callers share streams by role."""
    return _CudaCopies(device) if has_streams(device) else _ProcessorCopies()


def memory_for_state(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory of the host for copies of ``tensors``, of their shapes and dtypes: pinned for those of a device.

    Of a plan with offload, most of a rank's state is on the host already, and is copied there without a stream.
    """
    of_device = [tensor for tensor in tensors if has_streams(tensor.device)]
    pinned = iter(host_copies(of_device[0].device).to_keep_all(of_device) if of_device else ())
    return [
        next(pinned) if has_streams(tensor.device) else torch.empty_like(tensor, device="cpu") for tensor in tensors
    ]


@dataclass(frozen=True, slots=True)
class _There:
    """It is there already."""

    def wait(self) -> object:
        return None


class _ProcessorCopies:
    """Host and device are one."""

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(like, dtype=dtype, device="cpu")

    def to_keep_all(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_like(like, device="cpu") for like in likes]

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def mark_computed(self) -> Callable[[], None]:
        return _at_once

    def wait_until_computed(self) -> None:
        pass

    def within(self, role: StreamRole) -> AbstractContextManager[object]:
        return nullcontext()

    def outwards(self, role: StreamRole) -> AbstractContextManager[object]:
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def arrived(self, role: StreamRole) -> Arrived:
        return _There()


class _CudaCopies:
    """A copy out is waited for by its thread, a copy in by whoever reads the weights."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_keep(self, like: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return pinned_empty(like.numel(), dtype, self._device).view(like.shape)

    def to_keep_all(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return pinned_like(likes, self._device)

    def for_copies(self, weights: torch.Tensor) -> torch.Tensor:
        return self.to_keep(weights, dtype=weights.dtype)

    def mark_computed(self) -> Callable[[], None]:
        so_far = torch.cuda.current_stream(self._device).record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(so_far)

    def wait_until_computed(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def within(self, role: StreamRole) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream_for(self._device, role))

    def outwards(self, role: StreamRole) -> AbstractContextManager[object]:
        return _Outwards(stream_for(self._device, role))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def arrived(self, role: StreamRole) -> Arrived:
        return _Recorded(stream_for(self._device, role).record_event(), self._device)


class _Outwards(AbstractContextManager[None]):
    """Runs in a stream, and waits for it in the end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._context = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        copied = self._stream.record_event()
        self._context.__exit__(*error)
        copied.synchronize()


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
