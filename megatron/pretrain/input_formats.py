"""Finds out what the documents of a file are written in, by its content; its name counts only where that agrees.

The rules, in this order:

1. Its first bytes say that it is compressed, Parquet, or a format that is refused with what to do instead.
2. A file of white space, or of an empty JSON array, has no documents. One with NUL bytes is refused: it is binary, or
   text in UTF-16.
3. If its first line is a JSON object, it is JSON lines. If the first line is none and the second is an object with one
   of the keys that are asked for, it is JSON lines whose first line is damaged.
4. If it begins with an object over several lines, or with an array of objects, it is JSON.
5. Otherwise it is JSON lines if it is named so, refused if it is an array of strings or named JSON, CSV or Parquet, and
   else a text.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from hetero.errors import ConfigError
from hetero.serialization import parse_json
from hetero.units import MIB
from megatron.pretrain.compression import packing_of, unpacked
from megatron.pretrain.json_objects import json_objects

MAX_LINE_BYTES = 1024 * MIB
"""Largest line of JSON lines, object of JSON, or text. What is longer is no document but a list of them."""

HEAD_BYTES = MIB
"""Bytes from the beginning of a file that are searched for signs of its format."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The mark that some editors put at the beginning of UTF-8 text."""

Format = Literal["jsonl", "json", "text", "parquet", "empty"]
InputFormat = Literal["auto", "jsonl", "json", "text", "parquet"]

FORMAT_NAMES: Mapping[Format, str] = MappingProxyType(
    {
        "jsonl": "JSON lines",
        "json": "JSON, an object per document",
        "text": "text, a file per document",
        "parquet": "Parquet",
        "empty": "empty, without a document",
    }
)

AS_TEXT = "--input-format text takes each file as one document"

_OTHER_FORMATS: tuple[tuple[int, bytes, str], ...] = (
    # The mark of UTF-32 begins with that of UTF-16.
    (0, b"\xff\xfe\x00\x00", "text in UTF-32, must be in UTF-8; convert it, as iconv -f UTF-32 -t UTF-8 does"),
    (0, b"\x00\x00\xfe\xff", "text in UTF-32, must be in UTF-8; convert it, as iconv -f UTF-32 -t UTF-8 does"),
    (0, b"\xff\xfe", "text in UTF-16, must be in UTF-8; convert it, as iconv -f UTF-16 -t UTF-8 does"),
    (0, b"\xfe\xff", "text in UTF-16, must be in UTF-8; convert it, as iconv -f UTF-16 -t UTF-8 does"),
    (257, b"ustar", "a tar archive; unpack it and give the folder"),
    (0, b"PK\x03\x04", "a zip archive; unpack it and give the folder"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive; unpack it and give the folder"),
    (0, b"\x04\x22\x4d\x18", "compressed with lz4; decompress it, or use gzip, bzip2, xz or zstd"),
    (0, b"ARROW1\x00", "an Arrow file; write its table as Parquet"),
    (0, b"\xff\xff\xff\xff", "an Arrow stream; write its table as Parquet"),
    (0, b"Obj\x01", "an Avro file; write its records as JSON lines"),
    (0, b"%PDF-", "a PDF; extract its text first"),
    (0, b"WARC/1.", "a web archive (WARC, WET); write its texts as JSON lines"),
    (0, b"\x1e{", "a JSON text sequence; take out its record separators (tr -d '\\036'), which leaves JSON"),
    (0, b"MMIDIDX\x00", "the index of a Megatron dataset, which is tokenized already; give it to --data-path"),
)
"""Where in a file which bytes are, and what it is then (the specifications of the formats)."""

_PARQUET = b"PAR1\x15"
"""Its magic number, and the first field of the structure that follows (parquet-format, thrift's compact protocol)."""

_PACKED = frozenset({".gz", ".bz2", ".xz", ".zst"})
_NAMED_JSON_LINES = frozenset({".jsonl", ".ndjson", ".jsonlines", ".jl"})
_NAMED_OTHERWISE: Mapping[str, str] = MappingProxyType(
    {
        ".json": f"named JSON and does not begin with an object or an array of objects; {AS_TEXT}",
        ".csv": f"a table in CSV; convert it to JSON lines or Parquet, or {AS_TEXT}",
        ".tsv": f"a table in TSV; convert it to JSON lines or Parquet, or {AS_TEXT}",
        ".parquet": f"cannot be read as Parquet: it does not begin with PAR1; is the file complete? {AS_TEXT}",
    }
)


_EMPTY_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\]\s*")
_STRING_IN_ARRAY = re.compile(rb'\s*\[\s*"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*[],]', re.DOTALL)
_ARRAY_OF_STRINGS = f"a JSON array of strings, must be of objects; write objects with a text, or {AS_TEXT}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a file holds.

    packing: how it is compressed, one of :data:`~megatron.pretrain.compression.PACKINGS`; empty if it is not.
    first_keys: the keys of the first record of JSON, where it was looked at.
    refusal: why no documents can be read from it, and what to do; empty if they can.
    """

    format: Format
    packing: str = ""
    first_keys: tuple[str, ...] | None = None
    refusal: str = ""


def look_at(path: Path, input_format: InputFormat, keys: tuple[str, ...]) -> Content:
    """Find out what a file holds, by the rules above; an ``input_format`` other than auto is taken as given.

    Args:
        keys: of the texts in a record.

    Raises:
        ConfigError: the file cannot be read or decompressed.
    """
    with unpacked(path, "") as (file, _):
        head = file.read(HEAD_BYTES)
    packing = packing_of(head)
    if input_format != "auto":
        return Content(format=input_format, packing=packing)
    if packing:
        with unpacked(path, packing) as (stream, _):
            head = _read_up_to(stream, HEAD_BYTES)
    elif head.startswith(_PARQUET):
        return Content(format="parquet")
    if refusal := _refusal(head):
        return Content(format="text", packing=packing, refusal=refusal)
    if len(head) < HEAD_BYTES and not head.removeprefix(BYTE_ORDER_MARK).strip():
        return Content(format="empty", packing=packing)
    if len(head) < HEAD_BYTES and _EMPTY_ARRAY.fullmatch(head):
        return Content(format="empty", packing=packing)
    if (record := _record(path, packing, head, keys)) is not None:
        return Content(format=record[0], packing=packing, first_keys=record[1])
    suffix = _suffix(path)
    if suffix in _NAMED_JSON_LINES:
        return Content(format="jsonl", packing=packing)
    if _is_array_of_strings(head):
        return Content(format="text", packing=packing, refusal=_ARRAY_OF_STRINGS)
    return Content(format="text", packing=packing, refusal=_NAMED_OTHERWISE.get(suffix, ""))


def missing_key(key: str, keys: Iterable[str]) -> str:
    """Say that a record does not have ``key`` but ``keys``."""
    known = ", ".join(map(repr, keys)) or "none"
    return f"no key {key!r}, its keys are {known}; name one with --json-keys, or {AS_TEXT}"


def _refusal(head: bytes) -> str:
    """Say what is wrong with a file that begins with ``head``, if it cannot be text in UTF-8."""
    for offset, magic, what in _OTHER_FORMATS:
        if head.startswith(magic, offset):
            return what
    if packing := packing_of(head):
        return f"compressed twice, the second time with {packing}; decompress it once"
    if b"\x00" in head:
        return f"holds NUL bytes: it is binary, or text in UTF-16, must be text in UTF-8; {AS_TEXT}"
    return ""


def _record(
    path: Path, packing: str, head: bytes, keys: tuple[str, ...]
) -> tuple[Format, tuple[str, ...] | None] | None:
    """Return which JSON the file is, and the keys of its first record if that is whole; ``None`` if it is none."""
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(b"{") and (first := _first_line(path, packing)) is not None:
        return "jsonl", tuple(first)
    if text.startswith(b"[") and (first := _first_object(path, packing)) is not None:
        return "json", tuple(first)
    lines = [line for line in text.split(b"\n") if line.strip()]
    # The last one of several may go on after the head.
    second = lines[1] if len(lines) > 1 and (len(head) < HEAD_BYTES or len(lines) > 2) else b""
    if (record := _parsed(second)) is not None and not record.keys().isdisjoint(keys):
        return "jsonl", None
    if text.startswith(b"{") and (first := _first_object(path, packing)) is not None:
        return "json", tuple(first)
    return None


def _is_array_of_strings(head: bytes) -> bool:
    """Whether the file begins with a JSON array of strings; one that ends within ``head`` has nothing after it."""
    text = head.removeprefix(BYTE_ORDER_MARK)
    if not _STRING_IN_ARRAY.match(text):
        return False
    try:
        return len(head) == HEAD_BYTES or bool(parse_json(text.decode("utf-8", errors="replace"), source=""))
    except ConfigError:
        return False


def _suffix(path: Path) -> str:
    """Return what the name says of the format, in lower case: the ``.jsonl`` of ``a.jsonl.1`` and ``a.JSONL.gz``."""
    suffixes = [suffix for suffix in path.suffixes if not (suffix[1:].isdigit() or suffix in _PACKED)]
    return suffixes[-1].lower() if suffixes else ""


def _first_line(path: Path, packing: str) -> dict[str, Any] | None:
    """Return the object that the first line is, however long it is; ``None`` if it is none."""
    with unpacked(path, packing) as (stream, _):
        while line := stream.readline(MAX_LINE_BYTES):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                return _parsed(line)
    return None


def _first_object(path: Path, packing: str) -> dict[str, Any] | None:
    """Return the object that the file begins with, or the first of its array; ``None`` if there is none."""
    try:
        with unpacked(path, packing) as (stream, _):
            return _parsed(next(json_objects(stream, limit_bytes=MAX_LINE_BYTES, source=str(path)), b""))
    except ConfigError:
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object that ``line`` is; ``None`` if it is none."""
    text = line.removeprefix(BYTE_ORDER_MARK).strip()
    if not text.startswith(b"{"):
        return None
    try:
        record = parse_json(text.decode("utf-8", errors="replace"), source="", allow_nan=True)
    except ConfigError:
        return None
    return record if isinstance(record, dict) else None


def _read_up_to(stream: Any, size: int) -> bytes:
    """Read ``size`` bytes, or all that there are: decompressors return less at a time."""
    content = b""
    while len(content) < size and (more := stream.read(size - len(content))):
        content += more
    return content
