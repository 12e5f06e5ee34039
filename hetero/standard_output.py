"""Decides what stands on standard output: words for people, or with ``--json`` or ``-`` one document for programs.

Each command prints its words as if nobody had asked for anything else, and hands its document to :func:`answer` or
:func:`write_output`. Where a document is asked for, words go to stderr; with ``--quiet`` they go nowhere. Words are
printable, whatever is in the names that they repeat (:mod:`hetero.printable`); documents are exact.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from hetero.errors import ConfigError, HeteroError
from hetero.output_files import check_can_be_written, write_bytes
from hetero.printable import printable_lines, printable_output
from hetero.serialization import to_json
from hetero.shown_secrets import without_secrets

STDOUT = Path("-")
"""Stands for standard output where a file is to be written."""

_DOCUMENTS: ContextVar[TextIO | None] = ContextVar("_DOCUMENTS", default=None)
_ERRORS: ContextVar[TextIO | None] = ContextVar("_ERRORS", default=None)
"""Where documents go, and what stderr was when the command began."""


def output_file(text: str) -> Path:
    """The type of a flag that names a file to write; ``-`` is standard output. Any other path refuses ``-``."""
    return STDOUT if text == "/dev/stdout" else Path(text)


def add_output_options(parser: argparse.ArgumentParser, *, why_no_json: str = "") -> None:
    """Add ``--json`` and ``--quiet``; ``why_no_json`` says what becomes of ``--json`` where there is no document."""
    group = parser.add_argument_group("output")
    if why_no_json:
        group.add_argument("--json", action=_Refused, default=False, why=why_no_json)
    else:
        group.add_argument("--json", action="store_true", help="print one JSON document, and all words on stderr")
    group.add_argument(
        "--quiet", action="store_true", help="say nothing but errors; documents are printed all the same"
    )


class _Refused(argparse.Action):
    """A flag that a command has no use for, with the reason."""

    def __init__(self, *args: Any, why: str, **kwargs: Any) -> None:
        super().__init__(*args, **{"nargs": 0, "help": argparse.SUPPRESS, **kwargs})
        self.why = why

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.error(f"{self.option_strings[0]}: {self.why}; leave it out")


def output_words(args: argparse.Namespace) -> list[str]:
    """The flags of :func:`add_output_options` again, as they are typed."""
    return [flag for flag, is_given in (("--json", args.json), ("--quiet", args.quiet)) if is_given]


@contextlib.contextmanager
def directed_output(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[None]:
    """Send the words of a command where its flags say, and let :func:`answer` and :func:`write_output` through.

    Errors are told after it, or by :func:`tell_error` in it.

    Raises:
        ConfigError: two documents are to go to one place, or one to where a file is that the command reads.
    """
    written, read = _named_files(parser, args)
    documents = [*(["--json"] if args.json else []), *(f"{flag} -" for flag, path in written if path == STDOUT)]
    if len(documents) > 1:
        parser.error(f"{' and '.join(documents)}: standard output takes one of them; name a file, or leave one out")
    # A model may be named by the folder of its config.json.
    files = [(flag, file) for flag, path in read for file in (path, path / "config.json") if file.is_file()]
    for flag, path in written:
        # Devices and pipes, such as /dev/null, take any number of documents.
        if path == STDOUT or (path.exists() and not path.is_file()):
            continue
        for other, there in files:
            if path.resolve() == there.resolve():
                parser.error(f"{flag} {path}: it would replace the file of {other}; name another file")
        files.append((flag, path))
    before = _DOCUMENTS.set(sys.stdout), _ERRORS.set(sys.stderr)
    try:
        with contextlib.ExitStack() as stack:
            if args.quiet:
                nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            if args.quiet or documents:
                stack.enter_context(_descriptor_for_documents(sys.stderr))
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            stack.enter_context(printable_output())
            yield
    finally:
        _DOCUMENTS.reset(before[0])
        _ERRORS.reset(before[1])


@contextlib.contextmanager
def _descriptor_for_documents(words: TextIO) -> Iterator[None]:
    """Send to ``words`` what libraries print past Python, and documents to a copy of standard output.

    gloo of torch 2.10 to 2.12 prints a line there for each group. A caller that has replaced ``sys.stdout`` keeps its
    own.
    """
    stdout, is_replaced = sys.stdout, sys.stdout is not sys.__stdout__
    if is_replaced:
        yield
        return
    stdout.flush()
    with open(os.dup(stdout.fileno()), "w", encoding=stdout.encoding) as documents:  # noqa: PTH123  (a descriptor)
        os.dup2(words.fileno(), stdout.fileno())
        before = _DOCUMENTS.set(documents)
        try:
            yield
        finally:
            _DOCUMENTS.reset(before)
            documents.flush()
            os.dup2(documents.fileno(), stdout.fileno())


def documents_descriptor() -> int | None:
    """Return the descriptor on which a child prints its document; ``None`` where a caller's stream has none."""
    try:
        return (_DOCUMENTS.get() or sys.stdout).fileno()
    except io.UnsupportedOperation:
        return None


_NamedFile = tuple[str, Path]
"""What a file is called on the command line, and its path."""


def _named_files(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[list[_NamedFile], list[_NamedFile]]:
    """Return the files that a command writes, and those that it reads: as :func:`output_file` has the type of a flag,
    or ``Path``."""
    written: list[_NamedFile] = []
    read: list[_NamedFile] = []
    for action in parser._actions:
        flag = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        for path in _paths_in(getattr(args, action.dest, None)):
            (read if action.type is Path else written).append((flag, path))
    return written, read


def _paths_in(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths_in(each)


def answer(args: argparse.Namespace, document: Callable[[], Any]) -> None:
    """Print what ``document`` makes, a dataclass or plain data, as JSON, if ``--json`` asks for it."""
    if args.json:
        _print_document(to_json(document()))


def write_output(path: Path, content: bytes, *, is_private: bool = False) -> str:
    """Write a file that the user named; :data:`STDOUT` takes UTF-8.

    is_private: as :func:`hetero.output_files.write_bytes` has it.

    Returns:
        What to call the place.

    Raises:
        ConfigError: it cannot be written there.
    """
    if path != STDOUT:
        write_bytes(path, content, is_private=is_private)
        return str(path)
    _print_document(content.decode("utf-8"))
    return "standard output"


def check_output(path: Path, *, asked_by: str, suffixes: tuple[str, ...] = ()) -> None:
    """Check that :func:`write_output` can write there, before the work whose result goes there.

    suffixes: its name has to end in one of them; the first one is what standard output gets.

    Raises:
        ConfigError: it has another suffix, or cannot be written.
    """
    if path == STDOUT:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{asked_by} {path}: ends in {path.suffix!r}, must end in {' or '.join(suffixes)}")
    check_can_be_written(path, asked_by=asked_by)


def tell_error(error: HeteroError) -> None:
    """Tell a mistake on stderr, also with ``--quiet``."""
    print(printable_lines(f"hetero: {without_secrets(str(error))}"), file=_ERRORS.get() or sys.stderr)


def _print_document(text: str) -> None:
    stream = _DOCUMENTS.get() or sys.stdout
    stream.write(text)
    stream.flush()
