"""Tokenize text into Megatron's ``.bin`` and ``.idx`` files.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json --append-eod --workers 8

Input is cut into chunks that do not depend on the number of workers, and chunks are written in the order of the
input: the same input gives the same bytes with any number of workers. Output appears complete or not at all.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from hetero.extras import exit_without

# Before torch is imported by anyone.
exit_without("train", program="preprocess_data.py")

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hetero.command_line import Parser, UsageError, whole_number
from hetero.distributed.helper_processes import leave_ctrl_c_to_parent
from hetero.errors import ConfigError, HeteroError
from hetero.serialization import parse_json
from hetero.units import MIB
from megatron.training.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer

with warnings.catch_warnings():
    # It warns of every optional package that is not installed.
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

CHUNK_BYTES = 4 * MIB
"""Input of one task: large enough that handing it over costs nothing, small enough that memory stays small."""

MAX_LINE_BYTES = 1024 * MIB
"""Of JSONL, or of a text file. What has more is no document but a list of them, or no text."""

Format = Literal["jsonl", "text"]

# JSON can escape half of a surrogate pair, which is no text.
_HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What every worker has to know. Hashable: it is the key under which a process keeps its tokenizer."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int | None
    json_keys: tuple[str, ...]
    append_eod: bool
    skip_bad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """A text file, or the lines of a JSONL file that start in bytes ``[start, end)``."""

    path: Path
    format: Format
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """A document that cannot be used; ``offset`` in bytes is where its line starts."""

    span: FileRange
    offset: int
    reason: str

    def __str__(self) -> str:
        if self.span.format == "text":
            return f"{self.span.path}: {self.reason}"
        with self.span.path.open("rb") as file:
            line = 1 + _count_newlines(file, self.offset)
        return f"{self.span.path}, line {line}: {self.reason}"


@dataclass(kw_only=True, slots=True)
class Tokens:
    """Documents of a chunk under one key, end to end."""

    ids: np.ndarray
    lengths: list[int]


@dataclass(kw_only=True, slots=True)
class Counts:
    """What has been read so far, and what of it was left out."""

    num_bytes: int = 0
    num_empty: int = 0
    num_bad: int = 0
    first_bad: BadRecord | None = None

    def add(self, other: "Counts") -> None:
        self.num_bytes += other.num_bytes
        self.num_empty += other.num_empty
        self.num_bad += other.num_bad
        self.first_bad = self.first_bad or other.first_bad


def find_input(inputs: Sequence[str], *, input_format: str, pattern: str) -> list[FileRange]:
    """Every input file as one range: in the order given, those of a folder or a glob by name, none of them twice.

    Raises:
        ConfigError: something matches no file.
    """
    paths = dict.fromkeys(path for item in inputs for path in _expand(item, pattern))
    return [FileRange(path=p, format=_format_of(p, input_format), start=0, end=p.stat().st_size) for p in paths]


def cut_into_chunks(files: Sequence[FileRange], *, chunk_bytes: int) -> Iterator[tuple[FileRange, ...]]:
    """Cut long JSONL files and join short files to about ``chunk_bytes`` each, in order."""
    chunk: list[FileRange] = []
    size = 0
    for file in files:
        stride = chunk_bytes if file.format == "jsonl" else max(file.end, 1)
        for start in range(0, max(file.end, 1), stride):
            end = min(start + stride, file.end)
            chunk.append(FileRange(path=file.path, format=file.format, start=start, end=end))
            size += max(end - start, 1)
            if size >= chunk_bytes:
                yield tuple(chunk)
                chunk, size = [], 0
    if chunk:
        yield tuple(chunk)


def tokenize_chunk(recipe: Recipe, chunk: tuple[FileRange, ...]) -> tuple[dict[str, Tokens], Counts]:
    """Documents of a chunk by key. Stops at the first bad one unless the recipe skips them."""
    tokenizer = _tokenizer(recipe)
    ids: dict[str, list[int]] = {key: [] for key in recipe.json_keys}
    lengths: dict[str, list[int]] = {key: [] for key in recipe.json_keys}
    counts = Counts(num_bytes=sum(span.end - span.start for span in chunk))
    for span, offset, content in _read(chunk):
        try:
            texts = _texts(content, span.format, recipe.json_keys)
            # White space alone is no text: tokens of it, and an end of document, would be a sample of nothing.
            documents = {key: tokenizer.tokenize(text) if text.strip() else [] for key, text in texts.items()}
        except ConfigError as error:
            counts.add(Counts(num_bad=1, first_bad=BadRecord(span=span, offset=offset, reason=str(error))))
            if recipe.skip_bad:
                continue
            break
        for key, document in documents.items():
            if not document:
                counts.num_empty += 1
                continue
            if recipe.append_eod:
                document.append(tokenizer.eod)
            ids[key].extend(document)
            lengths[key].append(len(document))
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    return {key: Tokens(ids=np.array(ids[key], dtype=dtype), lengths=lengths[key]) for key in ids}, counts


class DatasetWriter:
    """Writes one ``.bin`` and ``.idx`` pair under partial names; :meth:`publish` gives them their own.

    As a context manager it removes what was not published.
    """

    def __init__(self, prefix: str, *, dtype: type[np.number[Any]], overwrite: bool) -> None:
        self.prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0
        self._files = {suffix: Path(prefix + suffix) for suffix in (".bin", ".idx")}
        self._partial = {suffix: Path(prefix + suffix + ".partial") for suffix in (".bin", ".idx")}
        for file in self._files.values():
            if file.exists() and not overwrite:
                raise ConfigError(f"{file}: exists already; give another --output-prefix, or --overwrite")
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(str(self._partial[".bin"]), dtype=dtype)
        except OSError as error:
            raise ConfigError(f"--output-prefix: {prefix} cannot be written: {error}") from None

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._builder.data_file.close()
        for file in self._partial.values():
            file.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * int(np.dtype(self._builder.dtype).itemsize)

    def add(self, tokens: Tokens) -> None:
        start = 0
        for length in tokens.lengths:
            self._builder.add_document(tokens.ids[start : start + length], [length])
            start += length
        self.num_documents += len(tokens.lengths)
        self.num_tokens += start

    def finish(self) -> None:
        """Complete the partial files, down to the disk."""
        self._builder.finalize(str(self._partial[".idx"]))
        for file in self._partial.values():
            with file.open("rb+") as written:
                os.fsync(written.fileno())

    def publish(self) -> None:
        # Readers look for the index: it goes first and comes last, so that no index meets another's data.
        self._files[".idx"].unlink(missing_ok=True)
        self._partial[".bin"].replace(self._files[".bin"])
        self._partial[".idx"].replace(self._files[".idx"])


def preprocess(
    recipe: Recipe,
    files: Sequence[FileRange],
    *,
    output_prefix: str,
    overwrite: bool,
    workers: int,
    chunk_bytes: int,
) -> list[str]:
    """Tokenize ``files`` into one dataset per key and return a line about each.

    Raises:
        ConfigError: a bad document (the first in input order), nothing to write, or output that exists.
    """
    if recipe.json_keys != ("text",) and (plain := [file for file in files if file.format == "text"]):
        raise ConfigError(
            f"{plain[0].path}: plain text has one key, 'text', and --json-keys asks for {' '.join(recipe.json_keys)}; "
            "give --input-format jsonl, or leave out --json-keys"
        )
    start_s = time.monotonic()
    dtype = DType.optimal_dtype(_tokenizer(recipe).vocab_size)
    counts = Counts()
    with contextlib.ExitStack() as stack:
        writers = {
            key: stack.enter_context(DatasetWriter(f"{output_prefix}_{key}_document", dtype=dtype, overwrite=overwrite))
            for key in recipe.json_keys
        }
        chunks = _tokenized(recipe, cut_into_chunks(files, chunk_bytes=chunk_bytes), workers=workers)
        stack.enter_context(contextlib.closing(chunks))
        progress = stack.enter_context(_Bar(sum(file.end for file in files)))
        for tokens, chunk_counts in chunks:
            counts.add(chunk_counts)
            if counts.first_bad is not None and not recipe.skip_bad:
                raise ConfigError(f"{counts.first_bad} (--skip-bad leaves such documents out)")
            for key, writer in writers.items():
                writer.add(tokens[key])
            progress.show(counts.num_bytes, max(writer.num_documents for writer in writers.values()))
        _check_not_empty(writers, counts)
        for writer in writers.values():
            writer.finish()
        for writer in writers.values():
            writer.publish()
    elapsed_s = time.monotonic() - start_s
    return [_summary(writer, counts, elapsed_s=elapsed_s) for writer in writers.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 when the input or a flag is wrong, 130 when interrupted; either way no output has been touched."""
    try:
        flags = _parser().parse_args(argv)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    given = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**given | {"json_keys": tuple(dict.fromkeys(flags.json_keys))})
    try:
        files = find_input(flags.input, input_format=flags.input_format, pattern=flags.pattern)
        lines = preprocess(
            recipe,
            files,
            output_prefix=flags.output_prefix,
            overwrite=flags.overwrite,
            workers=flags.workers,
            chunk_bytes=CHUNK_BYTES,
        )
    except HeteroError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("preprocess_data: interrupted, nothing written", file=sys.stderr)
        return 130
    print("\n".join(lines))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="preprocess_data.py", description="Tokenize text into Megatron's .bin and .idx files.")
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, globs or folders")
    parser.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="jsonl: a JSON object per line; text: a document per file; auto (default): by suffix, and a .json file "
        "is jsonl if its first line is an object",
    )
    parser.add_argument(
        "--pattern", default="*", help="files to take from folders, at any depth, hidden ones never; e.g. '*.py'"
    )
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="texts of a JSON object")
    parser.add_argument(
        "--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx for each key, 'text' by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace output that exists")
    parser.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    parser.add_argument(
        "--tokenizer-model", help="a tokenizer.json or a SentencePiece model, or the folder that has it"
    )
    parser.add_argument("--vocab-file", type=Path, help="GPT2BPETokenizer: its vocab.json")
    parser.add_argument("--merge-file", type=Path, help="GPT2BPETokenizer: its merges.txt")
    parser.add_argument("--vocab-size", type=int, help="ids of NullTokenizer; a limit for the others")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out what is not UTF-8, not JSON or lacks a key, and count it"
    )
    parser.add_argument(
        "--workers", type=whole_number(1, 1024), default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    return parser


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
        raise ConfigError(f"--input {item}: no such file or folder, and no file matches it (looked in {Path.cwd()})")
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _format_of(path: Path, input_format: str) -> Format:
    if input_format != "auto":
        return "jsonl" if input_format == "jsonl" else "text"
    if path.suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if path.suffix != ".json":
        return "text"
    with path.open("rb") as file:
        first = next((line for line in iter(lambda: file.readline(MAX_LINE_BYTES), b"") if line.strip()), b"")
    try:
        return "jsonl" if isinstance(parse_json(first.decode(), source="", allow_nan=True), dict) else "text"
    except (ConfigError, UnicodeDecodeError):
        return "text"


@functools.cache
def _tokenizer(recipe: Recipe) -> Tokenizer:
    """Built once per process: far too large to travel with every task."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file")
    return build_tokenizer(**{name: getattr(recipe, name) for name in names})


def _read(chunk: tuple[FileRange, ...]) -> Iterator[tuple[FileRange, int, bytes | OSError]]:
    """Where each record of a chunk starts, and its bytes."""
    for span in chunk:
        try:
            with span.path.open("rb") as file:
                if span.format == "text":
                    yield span, 0, file.read(MAX_LINE_BYTES + 1)
                    continue
                if span.start:  # the line that runs into this range belongs to the one before
                    file.seek(span.start - 1)
                    while (part := file.readline(MIB)) and not part.endswith(b"\n"):
                        pass
                while (offset := file.tell()) < span.end:
                    if (line := file.readline(MAX_LINE_BYTES + 1)).strip():
                        yield span, offset, line
        except OSError as error:
            yield span, 0, error


def _texts(content: bytes | OSError, format: Format, keys: tuple[str, ...]) -> dict[str, str]:
    if isinstance(content, OSError):
        raise ConfigError(f"cannot be read: {content.strerror}")
    if len(content) > MAX_LINE_BYTES:
        raise ConfigError(f"a line of more than {MAX_LINE_BYTES:,} bytes; give one document per line or file")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if format == "text":
        return {"text": text}
    record = parse_json(text.rstrip(), source="", allow_nan=True)
    if not isinstance(record, dict):
        raise ConfigError(f"not a JSON object but {type(record).__name__}")
    for key in keys:
        if key not in record:
            raise ConfigError(f"no key {key!r}, its keys are {', '.join(map(repr, record)) or 'none'}")
        if not isinstance(record[key], str):
            raise ConfigError(f"key {key!r} is not a text but {type(record[key]).__name__}")
        if _HALF_A_CHARACTER.search(record[key]):
            raise ConfigError(f"key {key!r} holds half a surrogate pair, which UTF-8 cannot say")
    return {key: record[key] for key in keys}


def _tokenized(
    recipe: Recipe, chunks: Iterator[tuple[FileRange, ...]], *, workers: int
) -> Generator[tuple[dict[str, Tokens], Counts], None, None]:
    """Results in the order of ``chunks``, few enough at a time that memory does not grow with the input."""
    if workers == 1:
        yield from (tokenize_chunk(recipe, chunk) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, initializer=leave_ctrl_c_to_parent, initargs=(os.getpid(),))
    pending: deque[Future[tuple[dict[str, Tokens], Counts]]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(tokenize_chunk, recipe, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise ConfigError(f"--workers {workers}: a worker was killed, out of memory? Give fewer") from None
    finally:
        pool.shutdown(cancel_futures=True)


class _Bar(Progress):
    """Bytes done, documents and bytes per second, time left; on a terminal only."""

    def __init__(self, num_bytes: int) -> None:
        console = Console(stderr=True)
        super().__init__(
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[documents]:,} documents, {task.fields[rate]:,.0f}/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self.add_task("", total=num_bytes, documents=0, rate=0.0)

    def show(self, num_bytes: int, num_documents: int) -> None:
        rate = num_documents / (self.tasks[0].elapsed or float("inf"))
        self.update(self._task, completed=num_bytes, documents=num_documents, rate=rate)


def _check_not_empty(writers: dict[str, DatasetWriter], counts: Counts) -> None:
    for key, writer in writers.items():
        if writer.num_documents == 0:
            raise ConfigError(
                f"--input: no document with any text under {key!r} ({counts.num_empty} empty, {counts.num_bad} bad)"
            )


def _summary(writer: DatasetWriter, counts: Counts, *, elapsed_s: float) -> str:
    line = (
        f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
        f"{writer.num_bytes / 1e6:,.1f} MB in {elapsed_s:,.1f} s "
        f"({writer.num_documents / elapsed_s:,.0f} documents/s, {counts.num_bytes / 1e6 / elapsed_s:,.1f} MB/s)"
    )
    if counts.num_empty:
        line += f"; left out {counts.num_empty:,} empty"
    if counts.num_bad:
        line += f"; left out {counts.num_bad:,} bad, the first: {counts.first_bad}"
    return line


def _count_newlines(file: BinaryIO, end: int) -> int:
    """Newlines in the first ``end`` bytes."""
    return sum(file.read(min(MIB, end - start)).count(b"\n") for start in range(0, end, MIB))


if __name__ == "__main__":
    sys.exit(main())
