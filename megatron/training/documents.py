"""Reads documents out of text files, JSON lines and Parquet, compressed or not, piece by piece and in order.

A JSONL file that is not compressed is cut into ranges of bytes, which workers read by themselves. What can only be
read from the front, a compressed file or Parquet, is read by the process that hands out the pieces, and travels with
them. Either way no more than some pieces are in memory.
"""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, Protocol

from hetero.errors import ConfigError
from hetero.extras import require
from hetero.serialization import parse_json
from hetero.units import MIB

MAX_LINE_BYTES = 1024 * MIB
"""Of JSONL, or of a text file. What has more is no document but a list of them, or no text."""

FIRST_CHUNK_BYTES = MIB // 16
"""Chunks grow from it with what has been handed out, so that the first ones are through within the first second."""

_GROWTH = 16
"""What has been handed out is this many times a chunk, once chunks grow."""

_ROWS = 1024
"""Of Parquet that are decoded at a time."""

Format = Literal["jsonl", "text", "parquet"]
InputFormat = Literal["auto", "jsonl", "text", "parquet"]

PACKINGS: Mapping[str, str] = MappingProxyType({".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"})
"""By suffix, how a file is compressed."""

# JSON can escape half of a surrogate pair, which is no text.
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A file of documents, or the lines of a plain JSONL file that start in bytes ``[start, end)``.

    packing: how it is compressed, one of :data:`PACKINGS`' values; empty if it is not.
    """

    path: Path
    format: Format
    packing: str = ""
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the input file that are done with it."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRecords:
    """Records that were read already: a piece of a file that can only be read from the front.

    first: the number of the first, from 1.
    num_bytes: of the input file, as it lies on the disk, that were read for them.
    """

    span: FileRange
    first: int
    records: tuple[bytes | dict[str, Any], ...]
    num_bytes: int


Piece = FileRange | HeldRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordPlace:
    """Where a record is, for messages.

    offset: where its line starts in a plain file, in bytes.
    number: of its line or row, from 1; ``None`` if the lines before it have to be counted.
    """

    span: FileRange
    offset: int = 0
    number: int | None = None

    def __str__(self) -> str:
        span, number = self.span, self.number
        if span.format == "text":
            return str(span.path)
        if number is None:
            with span.path.open("rb") as file:
                number = 1 + _count_newlines(file, self.offset)
        return f"{span.path}, {'row' if span.format == 'parquet' else 'line'} {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A document as it was read: its bytes, its columns, or why it could not be read."""

    place: RecordPlace
    content: bytes | dict[str, Any] | OSError

    def texts(self, keys: tuple[str, ...]) -> dict[str, str]:
        """The texts by key.

        Raises:
            ConfigError: it is no document; says why, and not where.
        """
        content = self.content
        if isinstance(content, OSError):
            raise ConfigError(f"cannot be read: {content.strerror}")
        if isinstance(content, bytes):
            text = _decoded(content)
            if self.place.span.format == "text":
                return {"text": text}
            content = parse_json(text.rstrip(), source="", allow_nan=True)
        if not isinstance(content, dict):
            raise ConfigError(f"not a JSON object but {type(content).__name__}")
        for key in keys:
            if key not in content:
                raise ConfigError(f"no key {key!r}, its keys are {', '.join(map(repr, content)) or 'none'}")
            if not isinstance(content[key], str):
                raise ConfigError(f"key {key!r} is not a text but {type(content[key]).__name__}")
            if _HALF_A_CHARACTER.search(content[key]):
                raise ConfigError(f"key {key!r} holds half a surrogate pair, which UTF-8 cannot say")
        return {key: content[key] for key in keys}


def find_input(inputs: Sequence[str], *, input_format: InputFormat, pattern: str) -> list[FileRange]:
    """Every input file as one range: in the order given, those of a folder or a glob by name, none of them twice.

    Raises:
        ConfigError: something matches no file, or a format needs a package that is not installed.
    """
    paths = dict.fromkeys(path for item in inputs for path in _expand(item, pattern))
    return [_whole(path, input_format) for path in paths]


def check_keys(files: Sequence[FileRange], keys: tuple[str, ...]) -> None:
    """Check what is known of keys before anything is read.

    Raises:
        ConfigError: a plain text has no such key, or a Parquet file no such column of texts.
    """
    for file in files:
        if file.format == "text" and keys != ("text",):
            raise ConfigError(
                f"{file.path}: plain text has one key, 'text', and --json-keys asks for {' '.join(keys)}; "
                "give --input-format jsonl, or leave out --json-keys"
            )
        if file.format == "parquet":
            _check_columns(file.path, keys)


def cut_into_chunks(
    files: Sequence[FileRange], *, keys: tuple[str, ...] = ("text",), chunk_bytes: int
) -> Iterator[tuple[Piece, ...]]:
    """Cut long files and join short ones to up to about ``chunk_bytes`` of documents each, in order.

    Raises:
        ConfigError: a file cannot be decompressed or is no Parquet.
    """
    sizes = _ChunkSizes(most=chunk_bytes)
    chunk: list[Piece] = []
    for file in files:
        for piece, size in _pieces(file, keys, sizes):
            chunk.append(piece)
            if sizes.is_full_with(size):
                yield tuple(chunk)
                chunk = []
    if chunk:
        yield tuple(chunk)


def records_of(chunk: tuple[Piece, ...]) -> Iterator[Record]:
    """The records of a chunk, in order; what cannot be read is one, too."""
    for piece in chunk:
        if isinstance(piece, HeldRecords):
            for number, content in enumerate(piece.records, start=piece.first):
                if isinstance(content, dict) or piece.span.format == "text" or content.strip():
                    yield Record(place=RecordPlace(span=piece.span, number=number), content=content)
            continue
        try:
            with piece.path.open("rb") as file:
                if piece.format == "text":
                    yield Record(place=RecordPlace(span=piece), content=file.read(MAX_LINE_BYTES + 1))
                else:
                    yield from _lines_of_range(file, piece)
        except OSError as error:
            yield Record(place=RecordPlace(span=piece), content=error)


class _Stream(Protocol):
    """Decompressed bytes."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readline(self, size: int = -1, /) -> bytes: ...


@dataclass(slots=True)
class _ChunkSizes:
    """How large the next chunk is to be. Chunks depend on the input alone, and not on the number of workers."""

    most: int
    handed_out: int = 0
    in_chunk: int = 0

    @property
    def limit(self) -> int:
        return min(self.most, max(FIRST_CHUNK_BYTES, self.handed_out // _GROWTH))

    def is_full_with(self, size: int) -> bool:
        """Whether the chunk is full once a piece of ``size`` bytes is in it; begins the next one if so."""
        # Empty files count, too: a chunk of a million of them would be a long one.
        self.in_chunk += max(size, 1)
        if self.in_chunk < self.limit:
            return False
        self.handed_out += self.in_chunk
        self.in_chunk = 0
        return True


def _pieces(file: FileRange, keys: tuple[str, ...], sizes: _ChunkSizes) -> Iterator[tuple[Piece, int]]:
    """The pieces of a file, and how many bytes of documents each has."""
    if file.format == "parquet":
        yield from _held(file, _rows(file, keys), sizes)
    elif file.packing:
        yield from _held(file, _unpacked_records(file), sizes)
    elif file.format == "text":
        yield file, file.end
    else:
        start = 0
        while True:
            end = min(start + sizes.limit, file.end)
            yield FileRange(path=file.path, format=file.format, start=start, end=end), end - start
            start = end
            if start >= file.end:
                return


def _held(
    file: FileRange, records: Iterator[tuple[bytes | dict[str, Any], int]], sizes: _ChunkSizes
) -> Iterator[tuple[HeldRecords, int]]:
    """Pieces of records, each of which comes with the bytes of the file that have been read for it and all before."""
    held: list[bytes | dict[str, Any]] = []
    size = num_held = done_bytes = 0
    for record, read_bytes in records:
        held.append(record)
        size += len(record) if isinstance(record, bytes) else sum(len(text or "") for text in record.values())
        if size >= sizes.limit:
            read = HeldRecords(span=file, first=num_held + 1, records=tuple(held), num_bytes=read_bytes - done_bytes)
            yield read, size
            num_held, done_bytes = num_held + len(held), read_bytes
            held, size = [], 0
    rest = HeldRecords(span=file, first=num_held + 1, records=tuple(held), num_bytes=file.end - done_bytes)
    yield rest, size


def _unpacked_records(file: FileRange) -> Iterator[tuple[bytes, int]]:
    with _unpacked(file.path, file.packing) as (unpacked, packed):
        if file.format == "text":
            yield unpacked.read(MAX_LINE_BYTES + 1), file.end
            return
        while line := unpacked.readline(MAX_LINE_BYTES + 1):
            yield line, packed.tell()


@contextmanager
def _unpacked(path: Path, packing: str) -> Iterator[tuple[_Stream, BinaryIO]]:
    """What a file says, decompressed, and the file itself.

    Raises:
        ConfigError: it is damaged, or something that the block reads.
    """
    with path.open("rb") as packed:
        try:
            match packing:
                case "":
                    yield packed, packed
                case "gzip":
                    with gzip.open(packed) as unpacked:
                        yield unpacked, packed
                case "bzip2":
                    with bz2.open(packed) as unpacked:
                        yield unpacked, packed
                case "xz":
                    with lzma.open(packed) as unpacked:
                        yield unpacked, packed
                case _:
                    require("data", asked_by=str(path))
                    import pyarrow as pa  # noqa: PLC0415  (optional: other files need none)

                    with pa.CompressedInputStream(pa.PythonFile(packed, "r"), packing) as stream:
                        yield BufferedReader(stream, MIB), packed
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            how = f" as {packing}" if packing else ""
            raise ConfigError(f"{path}: cannot be read{how}: {error}; is the file complete?") from None


def _rows(file: FileRange, keys: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], int]]:
    import pyarrow as pa  # noqa: PLC0415

    try:
        with _parquet(file.path) as table:
            num_rows, row = max(table.metadata.num_rows, 1), 0
            for batch in table.iter_batches(batch_size=_ROWS, columns=list(keys), use_threads=False):
                columns = batch.to_pydict()
                for values in zip(*(columns[key] for key in keys), strict=True):
                    row += 1
                    # Where in the file a row ends is not known; rows are about alike.
                    yield dict(zip(keys, values, strict=True)), file.end * row // num_rows
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file.path}: cannot be read as Parquet: {error}; is the file complete?") from None


def _parquet(path: Path) -> Any:
    """The open file, of which a page at a time is read."""
    require("data", asked_by=str(path))
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        return pq.ParquetFile(path, buffer_size=MIB, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {error}; is the file complete?") from None


def _check_columns(path: Path, keys: tuple[str, ...]) -> None:
    import pyarrow.types as kinds  # noqa: PLC0415

    with _parquet(path) as table:
        schema = table.schema_arrow
    for key in keys:
        if key not in schema.names:
            known = ", ".join(map(repr, schema.names)) or "none"
            raise ConfigError(f"{path}: no column {key!r}, its columns are {known}; name one with --json-keys")
        kind = schema.field(key).type
        held = kind.value_type if kinds.is_dictionary(kind) else kind
        if not (kinds.is_string(held) or kinds.is_large_string(held) or kinds.is_string_view(held)):
            texts = ", ".join(repr(field.name) for field in schema if kinds.is_string(field.type)) or "none"
            raise ConfigError(
                f"{path}: column {key!r} is of {kind}, must be a text; name one with --json-keys ({texts})"
            )


def _lines_of_range(file: BinaryIO, piece: FileRange) -> Iterator[Record]:
    if piece.start:  # the line that runs into this range belongs to the one before
        file.seek(piece.start - 1)
        while (part := file.readline(MIB)) and not part.endswith(b"\n"):
            pass
    while (offset := file.tell()) < piece.end:
        if (line := file.readline(MAX_LINE_BYTES + 1)).strip():
            yield Record(place=RecordPlace(span=piece, offset=offset), content=line)


def _decoded(content: bytes) -> str:
    if len(content) > MAX_LINE_BYTES:
        raise ConfigError(f"a line of more than {MAX_LINE_BYTES:,} bytes; give one document per line or file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _whole(path: Path, input_format: InputFormat) -> FileRange:
    packing = PACKINGS.get(path.suffix, "")
    if packing == "zstd" or path.suffix == ".parquet":
        require("data", asked_by=str(path))
    format = _format_of(path, packing, input_format)
    return FileRange(path=path, format=format, packing=packing, start=0, end=path.stat().st_size)


def _format_of(path: Path, packing: str, input_format: InputFormat) -> Format:
    if input_format != "auto":
        return input_format
    suffix = Path(path.stem).suffix if packing else path.suffix
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix == ".parquet":
        return "parquet"
    if suffix != ".json":
        return "text"
    with _unpacked(path, packing) as (file, _):
        first = next((line for line in iter(lambda: file.readline(MAX_LINE_BYTES), b"") if line.strip()), b"")
    try:
        return "jsonl" if isinstance(parse_json(first.decode(), source="", allow_nan=True), dict) else "text"
    except (ConfigError, UnicodeDecodeError):
        return "text"


def _expand(item: str, pattern: str) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        found = sorted(file for file in path.rglob(pattern) if file.is_file() and not _is_hidden(file, path))
        if not found:
            raise ConfigError(f"--input {item}: no file in this folder matches --pattern {pattern!r}")
        return found
    if path.is_file():
        return [path]
    found = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
    if not found:
        raise ConfigError(
            f"--input {item}: no such file or folder, and no file matches it (looked in {Path.cwd()}); "
            "give one that does"
        )
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _count_newlines(file: BinaryIO, end: int) -> int:
    """Newlines in the first ``end`` bytes."""
    return sum(file.read(min(MIB, end - start)).count(b"\n") for start in range(0, end, MIB))
