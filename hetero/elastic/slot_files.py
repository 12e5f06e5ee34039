"""Writes a unit into the same file again and again, straight from the tensors of training.

The files are those of :mod:`hetero.checkpoint.shards`. Their shapes do not change within an epoch, so a header is made
once, and the memory of a file is used again: fresh pages of ``/dev/shm`` take longer to get than to fill.
"""

import errno
import json
import mmap
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from isal import isal_zlib

from hetero.checkpoint.manifest import RankTensor, SavedBlock, Shard, block_key
from hetero.checkpoint.shards import DTYPE_CODES
from hetero.runtime.sharded_state import TensorSlice
from hetero.units import MIB

_PART_BYTES = 8 * MIB
"""Of a tensor that is copied and summed up at a time: a small part stays in the cache for its checksum, a large one
asks Python's interpreter lock less often."""


@contextmanager
def reused_file(path: Path, size_bytes: int) -> Iterator[int]:
    """Open a file to be written anew from its beginning; its memory is there before the first byte is written.

    A file with another hard link, which an upload holds, is left as it is: then this is a new one.

    Yields its descriptor.

    Raises:
        OSError: there is no room for it.
    """
    if path.exists() and path.stat().st_nlink > 1:
        path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileExistsError(errno.EEXIST, f"{path.name} is no regular file", str(path))
        os.posix_fallocate(descriptor, 0, max(size_bytes, 1))
        os.ftruncate(descriptor, size_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def mapped_file(path: Path, size_bytes: int) -> Iterator[memoryview]:
    """The bytes of a :func:`reused_file`, to be written.

    Raises:
        OSError: there is no room for it.
    """
    with reused_file(path, size_bytes) as descriptor, mmap.mmap(descriptor, size_bytes) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


class ShardLayout:
    """Where the blocks of a unit lie in its file, the same after every step.

    Args:
        slices: the blocks.
        rank_state: tensors of the rank itself; their shapes and types count.
        rank: who owns the unit.
    """

    def __init__(
        self, slices: Sequence[TensorSlice], *, rank_state: Mapping[str, torch.Tensor], rank: int | None
    ) -> None:
        self._rank = rank
        self._blocks = {block_key(each.name, each.offsets, each.tensor.shape): each for each in slices}
        self._rank_state = tuple(rank_state)
        tensors = {key: each.tensor for key, each in self._blocks.items()}
        tensors |= {RankTensor(name=name, crc32=0).key: tensor for name, tensor in rank_state.items()}
        # safetensors wants wide types first, so that each tensor begins at a multiple of its item's size.
        self._order = sorted(tensors, key=lambda key: -tensors[key].dtype.itemsize)
        entries: dict[str, object] = {}
        end = 0
        for key in self._order:
            tensor = tensors[key]
            entries[key] = {
                "dtype": DTYPE_CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.size_bytes = len(self._header) + end

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], rank_state: Mapping[str, torch.Tensor]) -> Shard:
        """Write the file of the unit.

        Args:
            tensors: on the host and contiguous, by the block's key.

        Raises:
            OSError: there is no room for it.
        """
        sources = {**tensors, **{RankTensor(name=name, crc32=0).key: tensor for name, tensor in rank_state.items()}}
        crc32_of = {}
        with reused_file(path, self.size_bytes) as descriptor:
            _write_all(descriptor, memoryview(self._header), start=0)
            start = len(self._header)
            for key in self._order:
                content = sources[key].detach().flatten().view(torch.uint8).numpy().data
                crc32_of[key] = _write_and_sum(descriptor, content, start=start)
                start += len(content)
        blocks = tuple(
            SavedBlock(name=each.name, offsets=each.offsets, shape=tuple(each.tensor.shape), crc32=crc32_of[key])
            for key, each in self._blocks.items()
        )
        extras = (RankTensor(name=name, crc32=0) for name in self._rank_state)
        return Shard(
            file=path.name,
            size_bytes=self.size_bytes,
            header_crc32=isal_zlib.crc32(self._header),
            boxes=blocks,
            rank=self._rank,
            rank_state=tuple(RankTensor(name=each.name, crc32=crc32_of[each.key]) for each in extras),
        )


def _write_and_sum(descriptor: int, content: memoryview, *, start: int) -> int:
    """Write ``content`` and return its checksum."""
    crc32 = 0
    for at in range(0, len(content), _PART_BYTES):
        part = content[at : at + _PART_BYTES]
        _write_all(descriptor, part, start=start + at)
        crc32 = isal_zlib.crc32(part, crc32)
    return crc32


def _write_all(descriptor: int, content: memoryview, *, start: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], start + done)
