"""Reads documents out of text files, JSON and Parquet, compressed or not, piece by piece and in order.

A JSONL file that is not compressed is cut into ranges of bytes, which workers read by themselves. What can only be
read from the front, a compressed file, Parquet or JSON that is not in lines, is read by the process that hands out the
pieces, and travels with them. Either way no more than some pieces are in memory.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hetero.errors import ConfigError
from hetero.extras import require
from hetero.serialization import parse_json
from hetero.units import MIB
from megatron.pretrain.compression import unpacked
from megatron.pretrain.input_formats import (
    BYTE_ORDER_MARK,
    FORMAT_NAMES,
    MAX_LINE_BYTES,
    Format,
    InputFormat,
    look_at,
    missing_key,
)
from megatron.pretrain.json_objects import json_objects

FIRST_CHUNK_BYTES = MIB // 16
"""Chunks grow from it with what has been handed out, so that the first ones are through within the first second."""

_GROWTH = 16
"""What has been handed out is this many times a chunk, once chunks grow."""

_ROWS = 1024
"""Of Parquet that are decoded at a time."""

_MAX_SUFFIXES = 5
"""Suffixes of files that a line about them counts one by one."""

_RECORDS = {"json": "object", "parquet": "row"}
"""What a record is called where it is no line."""

# JSON can escape half of a surrogate pair, which is no text.
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A file of documents, or the lines of a plain JSONL file that start in bytes ``[start, end)``.

    packing: how it is compressed, one of :data:`~megatron.pretrain.compression.PACKINGS`; empty if it is not.
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
    number: of its line, object or row, from 1; ``None`` if the lines before it have to be counted.
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
        return f"{span.path}, {_RECORDS.get(span.format, 'line')} {number}"


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
            if not text.strip():  # a line with nothing but a byte order mark
                return dict.fromkeys(keys, "")
            content = parse_json(text.rstrip(), source="", allow_nan=True)
        if not isinstance(content, dict):
            raise ConfigError(f"not a JSON object but {type(content).__name__}")
        for key in keys:
            if key not in content:
                raise ConfigError(missing_key(key, content))
            if not isinstance(content[key], str):
                raise ConfigError(f"key {key!r} is not a text but {type(content[key]).__name__}")
            if _HALF_A_CHARACTER.search(content[key]):
                raise ConfigError(f"key {key!r} holds half a surrogate pair, which UTF-8 cannot say")
        return {key: content[key] for key in keys}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundInput:
    """The input files, each as one range, and why others are left out."""

    files: tuple[FileRange, ...]
    left_out: tuple[str, ...] = ()

    def summary(self) -> list[str]:
        """Return a line for each format, with the suffixes of the files that are read as it."""
        groups: dict[str, list[Path]] = defaultdict(list)
        for file in self.files:
            groups[f"{FORMAT_NAMES[file.format]}{file.packing and f', {file.packing}'}"].append(file.path)
        return [f"read as {name}: {_described(paths)}" for name, paths in groups.items()]


def find_input(
    inputs: Sequence[str],
    *,
    input_format: InputFormat,
    pattern: str,
    keys: tuple[str, ...] = ("text",),
    skip_bad: bool = False,
) -> FoundInput:
    """Find every input file: in the order given, those of a folder or a glob by name, none of them twice.

    Args:
        keys: of the texts in a record.
        skip_bad: leave out files that have no documents that could be read.

    Raises:
        ConfigError: something matches no file, a file has no documents that could be read, or its first record lacks
            a text; or a format needs a package that is not installed.
    """
    files, left_out = [], []
    for path in dict.fromkeys(path for item in inputs for path in _expand(item, pattern)):
        content = look_at(path, input_format, keys)
        refusal = f"{path}: {content.refusal}" if content.refusal else ""
        if refusal and not skip_bad:
            raise ConfigError(f"{refusal} (--skip-bad leaves such files out)")
        if refusal:
            left_out.append(refusal)
            continue
        if content.packing == "zstd" or content.format == "parquet":
            require("data", asked_by=str(path))
        if content.first_keys is not None and not skip_bad:
            _check_has_keys(path, content.first_keys, keys)
        size = path.stat().st_size
        files.append(FileRange(path=path, format=content.format, packing=content.packing, start=0, end=size))
    return FoundInput(files=tuple(files), left_out=tuple(left_out))


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
        if isinstance(piece, FileRange) and piece.format == "empty":
            continue
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
    elif file.format == "empty" or (file.format == "text" and not file.packing):
        yield file, file.end
    elif file.packing or file.format == "json":
        yield from _held(file, _read_from_front(file), sizes)
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


def _read_from_front(file: FileRange) -> Iterator[tuple[bytes, int]]:
    with unpacked(file.path, file.packing) as (stream, packed):
        match file.format:
            case "text":
                yield stream.read(MAX_LINE_BYTES + 1), file.end
            case "json":
                for text in json_objects(stream, limit_bytes=MAX_LINE_BYTES, source=str(file.path)):
                    yield text, packed.tell()
            case _:
                while line := stream.readline(MAX_LINE_BYTES + 1):
                    yield line, packed.tell()


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


def _check_has_keys(path: Path, found: tuple[str, ...], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in found:
            raise ConfigError(f"{path}: {missing_key(key, found)}")


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
        return content.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _expand(item: str, pattern: str) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        found = sorted(file for file in path.rglob(pattern) if file.is_file() and not _is_hidden(file, path))
        if not found:
            raise ConfigError(f"--input {item}: no file in this folder matches --pattern {pattern!r}")
        return found
    if path.is_file():
        return [path]
    if path.exists():
        raise ConfigError(f"--input {item}: a pipe or a device, which is read only once; write its content to a file")
    found = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
    if not found:
        raise ConfigError(
            f"--input {item}: no such file or folder, and no file matches it (looked in {Path.cwd()}); "
            "give one that does"
        )
    return found


def _described(paths: list[Path]) -> str:
    """Name one file, or count several by suffix."""
    if len(paths) == 1:
        return str(paths[0])
    suffixes = Counter(path.suffix or "without a suffix" for path in paths).most_common()
    counts = [f"{count:,} {suffix}" for suffix, count in suffixes[:_MAX_SUFFIXES]]
    if rest := sum(count for _, count in suffixes[_MAX_SUFFIXES:]):
        counts.append(f"{rest:,} others")
    return f"{len(paths):,} files ({', '.join(counts)})"


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _count_newlines(file: BinaryIO, end: int) -> int:
    """Newlines in the first ``end`` bytes."""
    return sum(file.read(min(MIB, end - start)).count(b"\n") for start in range(0, end, MIB))
