"""Reads what the flags of data name as far as that takes no time: prefixes, weights, the header of an ``.idx`` file.

Every file of Megatron's indexed datasets begins so:

    9 bytes    ``MMIDIDX`` and two zeros
    uint64     version of the format, 1
    uint8      code of the tokens' type
    uint64     sequences; the length of each (int32) and where it begins (int64) follow
    uint64     documents; at which sequence each begins (int64) follows

No torch and no megatron-core here: a wrong path is told before they are loaded.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"

TYPE_CODES = range(1, 9)
"""Of tokens: what megatron-core's ``DType`` numbers."""

HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexHeader:
    """What the header of an ``.idx`` file says of the tokens in its ``.bin`` file; ``code`` of :data:`TYPE_CODES`."""

    index: Path
    data: Path
    code: int
    num_sequences: int
    num_documents: int


def read_index_header(prefix: str) -> IndexHeader:
    """Read the header of ``prefix.idx``, and see that ``prefix.bin`` is there.

    Raises:
        ConfigError: a file is missing or cannot be read, the index is none, or it has not the size that it says.
    """
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    header = _beginning(index)
    _beginning(data)
    if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
        raise ConfigError(f"{index}: no index of a Megatron dataset; tools/preprocess_data.py makes one")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    # Per sequence an int32 length and an int64 offset, per document an int64.
    expected, found = HEADER_BYTES + 12 * num_sequences + 8 * num_documents, index.stat().st_size
    # Data of several modes has a byte more for each sequence.
    if version != 1 or code not in TYPE_CODES or found not in (expected, expected + num_sequences):
        raise ConfigError(f"{index}: damaged, {expected} bytes are due and {found} there; make it anew")
    if num_sequences == 0 or num_documents == 0:
        raise ConfigError(f"{index}: holds no documents; give tools/preprocess_data.py files that have some")
    return IndexHeader(index=index, data=data, code=code, num_sequences=num_sequences, num_documents=num_documents)


def _beginning(path: Path) -> bytes:
    """As many bytes as a header has, if the file has so many."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; tools/preprocess_data.py makes it, data paths end before .bin")
    try:
        with path.open("rb") as file:
            return file.read(HEADER_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; change its permissions, or copy it anew"
        ) from None


def parse_blend(items: tuple[str, ...], *, flag: str) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Split the words of a flag into prefixes and their weights; a single prefix needs none.

    Raises:
        ConfigError: there are none, or a prefix or a weight stands where the other belongs.
    """
    if not items:
        raise ConfigError(f"data: nothing to read; give {flag}, --data-path or --mock-data")
    numbers = [_number(item) for item in items]
    if all(number is None for number in numbers):
        return items, None
    weights, prefixes = numbers[0::2], items[1::2]
    usable = all(weight is not None and math.isfinite(weight) and weight > 0 for weight in weights)
    if len(items) % 2 or not usable or any(number is not None for number in numbers[1::2]):
        raise ConfigError(
            f"{flag} {' '.join(items)}: give prefixes alone, or a positive weight before each, e.g. 0.3 a 0.7 b"
        )
    return prefixes, tuple(weight for weight in weights if weight is not None) if len(prefixes) > 1 else None


def _number(item: str) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None
