"""Recognises compressed files by their first bytes, and decompresses them as they are read."""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Protocol

from hetero.errors import ConfigError
from hetero.extras import require
from hetero.units import MIB

PACKINGS: Mapping[str, re.Pattern[bytes]] = MappingProxyType(
    {
        "gzip": re.compile(rb"\x1f\x8b\x08"),
        "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
        "xz": re.compile(rb"\xfd7zXZ\x00"),
        "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    }
)
"""Compression formats, and what such files begin with (RFC 1952, RFC 8878, the file formats of bzip2 and xz)."""


class Stream(Protocol):
    """A file, or what comes out of a decompressor, which is read from the front."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


def packing_of(head: bytes) -> str:
    """Return how a file that begins with ``head`` is compressed, one of :data:`PACKINGS`; else ``""``."""
    return next((packing for packing, magic in PACKINGS.items() if magic.match(head)), "")


@contextmanager
def unpacked(path: Path, packing: str) -> Iterator[tuple[Stream, BinaryIO]]:
    """Open a file and yield its decompressed bytes, and the file itself.

    Raises:
        ConfigError: the file cannot be read or is damaged; also for what the block reads. Or zstd is not installed.
    """
    try:
        with path.open("rb") as packed:
            match packing:
                case "":
                    yield packed, packed
                case "gzip":
                    with gzip.open(packed) as stream:
                        yield stream, packed
                case "bzip2":
                    with bz2.open(packed) as stream:
                        yield stream, packed
                case "xz":
                    with lzma.open(packed) as stream:
                        yield stream, packed
                case _:
                    require("data", asked_by=str(path))
                    import pyarrow as pa  # noqa: PLC0415  (optional: other files need none)

                    with pa.CompressedInputStream(pa.PythonFile(packed, "r"), packing) as stream:
                        yield BufferedReader(stream, MIB), packed
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        how = f" as {packing}" if packing else ""
        raise ConfigError(f"{path}: cannot be read{how}: {error}; is the file complete?") from None
