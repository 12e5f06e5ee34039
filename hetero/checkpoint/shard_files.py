"""Finds and checks what is in a shard file, wherever it lies; needs no torch.

A file is read by ranges of its bytes, so that it may lie in a local folder, behind another node's server, or in an
object store: whoever has it is a :class:`ShardFile`.
"""

import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from isal import isal_zlib

from hetero.checkpoint.manifest import Shard
from hetero.errors import CheckpointError, ConfigError
from hetero.serialization import parse_json
from hetero.units import MIB

_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I64": 8}
"""By what safetensors calls the types of training state; random number generators have numbers without a point."""

MAX_RANK_STATE_BYTES = MIB
"""Of all tensors of one rank in a shard: states of random number generators, of some 5 KB each."""

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads at most."""

_ENTRY_BYTES = 2048
"""Of a tensor in a header at most: name, type, shape and place take some 200."""

_PART_BYTES = 8 * MIB
"""That are summed up at a time."""


class ShardFile(Protocol):
    """The file of a shard, wherever it lies."""

    @property
    def where(self) -> str:
        """Names it for messages: its path or address."""

    def size_bytes(self) -> int:
        """Tell how long it is.

        Raises:
            CheckpointError: it is not there, or cannot be reached.
        """

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill ``buffer`` with the bytes of the file from ``start`` on.

        Raises:
            CheckpointError: it ends before, or cannot be read.
        """


class LocalShardFile:
    """A shard file in a folder of this host."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        """The path, for messages."""
        return str(self._path)

    def size_bytes(self) -> int:
        """Tell how long it is.

        Raises:
            CheckpointError: it is not there.
        """
        if not self._path.is_file():
            raise CheckpointError(
                f"{self._path}: shard missing; the folder has to be on a file system that all hosts see, with all its "
                "files"
            )
        try:
            return self._path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from None

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill ``buffer`` with the bytes of the file from ``start`` on.

        Raises:
            CheckpointError: it ends before, or cannot be read.
        """
        done = 0
        try:
            with self._path.open("rb", buffering=0) as file:
                while done < len(buffer):
                    if not (read := os.preadv(file.fileno(), [buffer[done:]], start + done)):
                        raise CheckpointError(
                            f"{self._path}: it ends at {start + done} bytes: damaged; load another step"
                        )
                    done += read
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a shard file: at bytes ``[start, end)``. ``code`` is what safetensors calls its type."""

    start: int
    end: int
    code: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Of one number."""
        return _ITEM_BYTES[self.code]


def max_header_bytes(num_tensors: int) -> int:
    """Return how many bytes the header of a shard file with so many tensors has at most."""
    return min(_ENTRY_BYTES * (num_tensors + 1), _MAX_HEADER_BYTES)


def read_header(file: ShardFile, size_bytes: int, *, limit_bytes: int = _MAX_HEADER_BYTES) -> bytes:
    """Read the first bytes of a file, up to its first tensor; no more than ``limit_bytes``, and eight for its length.

    Raises:
        CheckpointError: it ends before, or cannot be read.
    """
    length = bytearray(8)
    file.read_into(memoryview(length), start=0)
    # A length that is not to be trusted takes no more memory, and reads no further, than a header can.
    header = bytearray(min(int.from_bytes(length, "little"), limit_bytes, max(size_bytes - 8, 0)))
    file.read_into(memoryview(header), start=8)
    return bytes(length + header)


def checked_places(file: ShardFile, shard: Shard) -> Mapping[str, Place]:
    """Where the tensors of a shard lie in its file, by key, once its length and header are known to be right.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    if (size_bytes := file.size_bytes()) != shard.size_bytes:
        raise CheckpointError(
            f"{file.where}: it has {size_bytes} bytes, not {shard.size_bytes}: damaged; load another step"
        )
    header = read_header(file, size_bytes, limit_bytes=max_header_bytes(len(shard.boxes) + len(shard.rank_state)))
    if isal_zlib.crc32(header) != shard.header_crc32:
        raise CheckpointError(f"{file.where}: the checksum of its header is wrong: damaged; load another step")
    try:
        return _places_in(header, size_bytes)
    except (ConfigError, UnicodeDecodeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file.where}: not a safetensors file: {error}") from None


def check_whole(file: ShardFile, shard: Shard) -> None:
    """Check every byte of a file against ``shard``.

    Raises:
        CheckpointError: the file is missing, truncated or damaged.
    """
    places = checked_places(file, shard)
    crc32_of = {block.key: block.crc32 for block in shard.boxes}
    crc32_of |= {tensor.key: tensor.crc32 for tensor in shard.rank_state}
    if places.keys() != crc32_of.keys():
        raise CheckpointError(f"{file.where}: it has other tensors than its description: damaged")
    buffer = memoryview(bytearray(min(_PART_BYTES, shard.size_bytes)))
    for key, place in places.items():
        crc32 = 0
        for start in range(place.start, place.end, _PART_BYTES):
            part = buffer[: min(_PART_BYTES, place.end - start)]
            file.read_into(part, start=start)
            crc32 = isal_zlib.crc32(part, crc32)
        if crc32 != crc32_of[key]:
            raise CheckpointError(f"{file.where}: the checksum of {key} is wrong: damaged")


@functools.lru_cache(maxsize=16)
def _places_in(header: bytes, size_bytes: int) -> Mapping[str, Place]:
    """Kept: the copies that a rank fetches one step after the other have the same header."""
    return MappingProxyType(dict(_places(header, size_bytes=size_bytes)))


def _places(header: bytes, *, size_bytes: int) -> Iterator[tuple[str, Place]]:
    """What the header of a safetensors file says, its eight bytes of length included.

    Raises:
        ConfigError: it is no JSON.
        ValueError, TypeError, KeyError, AttributeError: it is no header, or points outside of its file.
    """
    for key, entry in parse_json(header[8:].decode(), source="").items():
        if key == "__metadata__":
            continue
        start, end = (len(header) + offset for offset in entry["data_offsets"])
        place = Place(start, end, entry["dtype"], tuple(entry["shape"]))
        if not all(type(number) is int and number >= 0 for number in (start, end, *place.shape)):
            raise ValueError(f"{key} has numbers that are none of a size")
        if not len(header) <= start <= end <= size_bytes or end - start != math.prod(place.shape) * place.item_bytes:
            raise ValueError(f"{key} is not inside of it")
        yield key, place
