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
import importlib
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

# The code of this checkout, whatever is installed.
if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.pretrain.start_check import exit_if_unusable

# Before torch is imported by anyone.
exit_if_unusable("preprocess_data.py")

import numpy as np

from hetero.command_line import Parser, UsageError, whole_number
from hetero.distributed.helper_processes import leave_ctrl_c_to_parent
from hetero.errors import ConfigError, HeteroError
from hetero.printable import printable_output
from hetero.progress import WorkProgress
from hetero.units import MIB
from megatron.pretrain.cli.preprocess_flags import take_out_megatron_flags
from megatron.pretrain.documents import (
    FoundInput,
    Piece,
    check_keys,
    cut_into_chunks,
    find_input,
    records_of,
)
from megatron.pretrain.input_formats import InputFormat
from megatron.pretrain.tokenizer import TOKENIZER_TYPES, HuggingFaceTokenizer, Tokenizer, build_tokenizer

CHUNK_BYTES = 4 * MIB
"""Documents of one task at most: enough that handing it over costs nothing, so few that memory stays small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What every worker has to know. Hashable: it is the key under which a process keeps its tokenizer.

    includes_special_tokens: ``None`` if no flag says so, which leaves them out.
    """

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_file: Path | None = None
    merge_file: Path | None = None
    vocab_size: int | None
    null_eod: int | None = None
    json_keys: tuple[str, ...]
    append_eod: bool
    includes_special_tokens: bool | None
    skip_bad: bool


@dataclass(kw_only=True, slots=True)
class Tokens:
    """Documents of a chunk under one key, end to end."""

    ids: np.ndarray
    lengths: list[int]


@dataclass(kw_only=True, slots=True)
class Counts:
    """What has been read so far, and what of it was left out. ``first_bad`` says where that is, and why."""

    num_bytes: int = 0
    num_empty: int = 0
    num_bad: int = 0
    first_bad: str = ""

    def add(self, other: "Counts") -> None:
        self.num_bytes += other.num_bytes
        self.num_empty += other.num_empty
        self.num_bad += other.num_bad
        self.first_bad = self.first_bad or other.first_bad


def tokenize_chunk(recipe: Recipe, chunk: tuple[Piece, ...]) -> tuple[dict[str, Tokens], Counts]:
    """Documents of a chunk by key. Stops at the first bad one unless the recipe skips them."""
    tokenizer = _tokenizer(recipe)
    ids: dict[str, list[int]] = {key: [] for key in recipe.json_keys}
    lengths: dict[str, list[int]] = {key: [] for key in recipe.json_keys}
    counts = Counts(num_bytes=sum(piece.num_bytes for piece in chunk))
    for record in records_of(chunk):
        try:
            texts = record.texts(recipe.json_keys)
            # White space alone is no text: tokens of it, and an end of document, would be a sample of nothing.
            documents = {key: tokenizer.tokenize(text) if text.strip() else [] for key, text in texts.items()}
        except ConfigError as error:
            counts.add(Counts(num_bad=1, first_bad=f"{record.place}: {error}"))
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
    dtype = _indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size)
    return {key: Tokens(ids=np.array(ids[key], dtype=dtype), lengths=lengths[key]) for key in ids}, counts


class DatasetWriter:
    """Writes one ``.bin`` and ``.idx`` pair under partial names; :meth:`publish` gives them their own.

    As a context manager it removes what was not published.
    """

    def __init__(self, prefix: str, *, dtype: type[np.number[Any]]) -> None:
        self.prefix = prefix
        self.num_documents = 0
        self.num_tokens = 0
        self._files = {suffix: Path(prefix + suffix) for suffix in (".bin", ".idx")}
        self._partial = {suffix: Path(prefix + suffix + ".partial") for suffix in (".bin", ".idx")}
        try:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._builder = _indexed_dataset().IndexedDatasetBuilder(str(self._partial[".bin"]), dtype=dtype)
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
    found: FoundInput,
    *,
    output_prefix: str,
    overwrite: bool,
    workers: int,
    chunk_bytes: int,
) -> list[str]:
    """Tokenize the input into one dataset per key and return a line about each. Prints what the input is read as.

    Raises:
        ConfigError: a bad document (the first in input order), nothing to write, or output that exists.
    """
    check_keys(found.files, recipe.json_keys)
    # A tokenizer that cannot be read, and output that is there, are told before torch is imported.
    tokenizer = _tokenizer(recipe)
    prefixes = {key: f"{output_prefix}_{key}_document" for key in recipe.json_keys}
    for prefix in prefixes.values():
        _check_may_write(prefix, overwrite=overwrite)
    print("\n".join([*found.summary(), *_tokens_around(recipe, tokenizer)]), flush=True)
    counts = Counts(num_bad=len(found.left_out), first_bad=next(iter(found.left_out), ""))
    num_bytes = sum(file.num_bytes for file in found.files)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(WorkProgress("tokenizing", total=num_bytes, text="loading megatron-core"))
        dtype = _indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size)
        start_s = time.monotonic()
        progress.show(0, _done(0, 0, num_bytes))
        writers = {key: stack.enter_context(DatasetWriter(prefix, dtype=dtype)) for key, prefix in prefixes.items()}
        cut = cut_into_chunks(found.files, keys=recipe.json_keys, chunk_bytes=chunk_bytes)
        chunks = _tokenized(recipe, cut, workers=workers)
        stack.enter_context(contextlib.closing(chunks))
        for tokens, chunk_counts in chunks:
            counts.add(chunk_counts)
            if counts.first_bad and not recipe.skip_bad:
                raise ConfigError(f"{counts.first_bad} (--skip-bad leaves such documents out)")
            for key, writer in writers.items():
                writer.add(tokens[key])
            num_documents = max(writer.num_documents for writer in writers.values())
            progress.show(
                counts.num_bytes, _done(num_documents, counts.num_bytes, num_bytes, time.monotonic() - start_s)
            )
        _check_not_empty(writers, counts)
        for writer in writers.values():
            writer.finish()
        for writer in writers.values():
            writer.publish()
    elapsed_s = time.monotonic() - start_s
    return [_summary(writer, counts, elapsed_s=elapsed_s) for writer in writers.values()]


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 when the input or a flag is wrong, 130 when interrupted; either way no output has been touched."""
    try:
        flags = _parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    given = {field.name: getattr(flags, field.name) for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**given | {"json_keys": tuple(dict.fromkeys(flags.json_keys))})
    try:
        found = find_input(
            flags.input,
            input_format=flags.input_format,
            pattern=flags.pattern,
            keys=recipe.json_keys,
            skip_bad=recipe.skip_bad,
        )
        lines = preprocess(
            recipe,
            found,
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


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; prints which of Megatron-LM's flags have no effect.

    Raises:
        UsageError: a flag or a value is wrong.
    """
    parser = _parser()
    words, notes, problems = take_out_megatron_flags(argv)
    if problems:
        parser.error("; ".join(problems))
    flags: argparse.Namespace = parser.parse_args(words)
    if flags.includes_special_tokens and flags.tokenizer_type != "HuggingFaceTokenizer":
        notes["--tokenizer-hf-include-special-tokens"] = "only HuggingFaceTokenizer reads it"
    for reason in dict.fromkeys(notes.values()):
        names = [name for name, why in notes.items() if why == reason]
        print(f"without effect: {', '.join(names)}: {reason}", flush=True)
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="preprocess_data.py", description="Tokenize text into Megatron's .bin and .idx files.")
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, globs or folders")
    parser.add_argument(
        "--input-format",
        choices=get_args(InputFormat),
        default="auto",
        help="jsonl: a JSON object per line; json: objects over several lines, or an array of them; parquet: a row per "
        "document; text: a document per file; auto (default): by the content of each file. Any but parquet may be "
        "compressed by gzip, bzip2, xz or zstd, whatever its name",
    )
    parser.add_argument(
        "--pattern", default="*", help="files to take from folders, at any depth, hidden ones never; e.g. '*.py'"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="texts of a JSON object, or columns of Parquet"
    )
    parser.add_argument(
        "--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx for each key, 'text' by default"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace output that exists")
    parser.add_argument(
        "--tokenizer-type",
        required=True,
        choices=TOKENIZER_TYPES,
        help="HuggingFaceTokenizer reads the tokenizer.json of any model; the three with SentencePiece models, GPT-2's "
        "two files, bytes as tokens, and text that is numbers already",
    )
    parser.add_argument(
        "--tokenizer-model", help="a tokenizer.json or a SentencePiece model, or the folder that has it"
    )
    parser.add_argument("--vocab-file", type=Path, help="GPT2BPETokenizer: its vocab.json")
    parser.add_argument("--merge-file", type=Path, help="GPT2BPETokenizer: its merges.txt")
    parser.add_argument("--vocab-size", type=int, help="ids of NullTokenizer; a limit for the others")
    parser.add_argument(
        "--null-tokenizer-eod-id",
        dest="null_eod",
        type=whole_number(0),
        help="NullTokenizer: id that --append-eod ends documents with (default: the last one)",
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument(
        "--tokenizer-hf-include-special-tokens",
        dest="includes_special_tokens",
        action="store_true",
        default=None,
        help="HuggingFaceTokenizer: add the tokens of its post-processor to each document, as most a BOS at the start",
    )
    parser.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        dest="includes_special_tokens",
        action="store_false",
        help="HuggingFaceTokenizer: do not add them (default, and a line says which are left out)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out what is not UTF-8, not JSON or lacks a text, and count it"
    )
    parser.add_argument("--dataset-impl", choices=["mmap"], help="accepted for Megatron-LM's scripts")
    parser.add_argument(
        "--workers", type=whole_number(1, 1024), default=os.cpu_count() or 1, help="processes (default: all cores)"
    )
    return parser


@functools.cache
def _tokenizer(recipe: Recipe) -> Tokenizer:
    """Built once per process: far too large to travel with every task."""
    names = ("tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file", "merge_file", "null_eod")
    given = {name: getattr(recipe, name) for name in names}
    return build_tokenizer(**given, includes_special_tokens=bool(recipe.includes_special_tokens))


@functools.cache
def _indexed_dataset() -> ModuleType:
    """megatron-core's module, which imports torch; workers get it from the process that forks them."""
    from hetero.runtime import cpu_backend

    # Without what megatron-core compiles and imports for others, which takes longer than all the rest of it.
    cpu_backend.install()
    with warnings.catch_warnings():
        # It warns of every optional package that is not installed.
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.datasets.indexed_dataset")


def _check_may_write(prefix: str, *, overwrite: bool) -> None:
    for suffix in (".bin", ".idx"):
        if Path(prefix + suffix).exists() and not overwrite:
            raise ConfigError(f"{prefix}{suffix}: exists already; give another --output-prefix, or --overwrite")


def _tokenized(
    recipe: Recipe, chunks: Iterator[tuple[Piece, ...]], *, workers: int
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


def _done(num_documents: int, num_bytes: int, total_bytes: int, elapsed_s: float = 0.0) -> str:
    """What has been done, for :class:`WorkProgress`; bytes are those of the input as it lies on the disk."""
    rate = num_bytes / 1e6 / elapsed_s if elapsed_s else 0.0
    return f"{num_documents:,} documents, {num_bytes / 1e6:,.1f}/{total_bytes / 1e6:,.1f} MB, {rate:,.1f} MB/s"


def _tokens_around(recipe: Recipe, tokenizer: Tokenizer) -> list[str]:
    """Say which tokens begin and end documents, as far as that is not plain from the flags."""
    lines = []
    if recipe.append_eod:
        lines.append(f"end of document: {tokenizer.eod_origin}")
    added = tokenizer.added_tokens() if isinstance(tokenizer, HuggingFaceTokenizer) else []
    shown = ", ".join(map(repr, added))
    if added and recipe.includes_special_tokens is None:
        lines.append(
            f"documents are without {shown}, which Megatron-LM's HuggingFaceTokenizer adds by default; "
            "--tokenizer-hf-include-special-tokens adds it, --tokenizer-hf-no-include-special-tokens silences this line"
        )
    if added and recipe.includes_special_tokens:
        twice = recipe.append_eod and tokenizer.tokenize("")[-1] == tokenizer.eod
        lines.append(f"documents have {shown} added{', so that the end of document is there twice' if twice else ''}")
    return lines


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


if __name__ == "__main__":
    sys.exit(main())
