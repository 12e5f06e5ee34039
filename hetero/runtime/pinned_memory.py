"""Owns the pinned memory of a rank's host: regions of the size that is asked for, rounded up to a page.

torch's own allocator (``pin_memory=True``) rounds a block up to a power of two and keeps it to the end of the process
(CachingHostAllocator.h). Here a region is anonymous memory that is registered with CUDA, and given back when the last
tensor in it is gone. For copies both are alike: they are asynchronous, and ``is_pinned`` is true of both.

* **Who drops the last tensor of a region must have waited for its copies.** torch's allocator keeps a block until the
  streams that copy from it are that far. It does not know these regions (``record_event`` in Copy.cu finds no block).
* **Regions are made and given back between steps only**, as CUDA may wait for the device in both, and in a step a
  pending receive holds up the device until its message comes. Gathers may be pending between steps. They wait for
  updates of other ranks, and these for nothing that this rank does in its next step.
"""

import mmap
import sys
from collections.abc import Sequence

import torch

from hetero.errors import ConfigError
from hetero.units import MIB

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every context of the process."""

_ALIGNMENT = 64
"""Bytes at whose multiples tensors begin that share a region: a line of most processors' caches."""

_KEPT: "list[_Region]" = []
"""Regions that were dropped while the device was busy, as after a failure. The process is about to end."""


def pinned_empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros in a region of its own, for copies from and to ``device``.

    Raises:
        ConfigError: the host does not have the memory, or does not allow this process to pin it.
    """
    num_bytes = numel * dtype.itemsize
    return _Region.make(num_bytes, device)[:num_bytes].view(dtype) if num_bytes else torch.empty(0, dtype=dtype)


def pinned_like(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return tensors of the same shapes and dtypes, contiguous and all in one region; errors as :func:`pinned_empty`.

    A region costs a call of the driver, and up to a page: small tensors share one.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    parts = pinned_empty(sum(sizes), torch.uint8, device).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]


class _Region(mmap.mmap):
    """Anonymous memory that is registered with CUDA until its last tensor is gone."""

    _address = 0
    _device: torch.device

    @classmethod
    def make(cls, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return the bytes of a new region, which lives as long as any tensor that shares them."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            region = cls(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _cannot_pin(size, str(error)) from None
        # A process that is forked, such as a reader of data, would get a copy of every page that is pinned.
        region.madvise(mmap.MADV_DONTFORK)
        found = torch.frombuffer(region, dtype=torch.uint8)
        cudart = torch.cuda.cudart()
        result = cudart.cudaHostRegister(found.data_ptr(), size, _PORTABLE)
        if int(result) != 0:
            raise _cannot_pin(size, cudart.cudaGetErrorString(result))
        region._device, region._address = device, found.data_ptr()
        return found

    def __del__(self) -> None:
        # Before the memory is unmapped.
        if not self._address or sys.is_finalizing():
            return
        if _is_idle(self._device):
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._address)
        else:
            _KEPT.append(self)


def _is_idle(device: torch.device) -> bool:
    try:
        return bool(torch.cuda.default_stream(device).query())
    except RuntimeError:
        return False  # The device has failed.


def _cannot_pin(num_bytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"pinned memory: {num_bytes / MIB:,.0f} MiB of this host's memory cannot be pinned ({reason}); raise the limit "
        "of locked memory (ulimit -l unlimited), give the host more memory, or leave less to it"
    )
