"""Shows text of strangers as it is written: no character of it moves the cursor, ends a line or hides another one.

Names come from cluster files, plans, hostfiles, etcd and other ranks, and reach terminals, logs and lines that are
pasted into a shell. What Unicode calls not printable (control and format characters such as escape, a newline, a change
of direction) is written as Python writes it in a literal: ``\\x1b``.

Names that are not printable are refused where they are read (:mod:`hetero.printable_fields`); this is for the rest.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

_LINES_AND_TABS = re.compile(r"([\n\t]+)")


def printable(text: str) -> str:
    """Return ``text`` as one line, with what is not printable written as escapes."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Return ``text`` with its lines and tabs as they are; all else that is not printable is written as escapes."""
    if text.isprintable():
        return text
    parts = _LINES_AND_TABS.split(text)
    parts[::2] = map(printable, parts[::2])
    return "".join(parts)


def encodable(text: str) -> str:
    """Return ``text`` with what UTF-8 cannot hold written as escapes, such as bytes of a path that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _shown(character: str) -> str:
    return character if character.isprintable() else repr(character)[1:-1]


class PrintableStream:
    """A text stream that writes to another one, all through :func:`printable_lines`; else it is as that one.

    Attributes:
        exact: the other stream, for what is clean and has escape sequences of its own, such as styles.
    """

    def __init__(self, stream: TextIO) -> None:
        self.exact = stream

    def write(self, text: str) -> int:
        """Write ``text``, and return the number of its characters."""
        self.exact.write(printable_lines(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other stream."""
        return getattr(self.exact, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Have all that this process prints in words be printable; also a decorator of a program's main function.

    A stream that another one has replaced meanwhile is not put back.
    """
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: PrintableStream(stream) for name, stream in before.items()}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
