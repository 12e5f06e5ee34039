"""Keeps a process alive whose output cannot be written, such as to a file on a full disk; needs no torch."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from hetero.printable import PrintableStream


class _LossyOutput(io.RawIOBase):
    """Output that never raises: what no descriptor takes is dropped.

    Args:
        descriptors: the first one that takes all of a write gets it.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._has_part: set[int] = set()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptors[0]

    def isatty(self) -> bool:
        return os.isatty(self.fileno())

    def write(self, data: Any) -> int:
        for descriptor in self._descriptors:
            if self._takes(descriptor, bytes(data)):
                break
        return len(data)

    def _takes(self, descriptor: int, data: bytes) -> bool:
        if descriptor in self._has_part:
            # What it takes next is no continuation of that line.
            data = b"\n" + data
        size = len(data)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            if len(data) < size:
                self._has_part.add(descriptor)
            return False
        self._has_part.discard(descriptor)
        return True


def ignore_output_errors(*, fallback: int | None = None) -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that drop what cannot be written, instead of raising.

    Otherwise a full disk, a lost file server or a closed pipe ends the process at its next ``print``, or makes its exit
    code 120 when the interpreter flushes these streams last. Streams without a descriptor, and those that were replaced
    before, stay as they are.

    Args:
        fallback: descriptor that gets what the stream's own does not take.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _LossyOutput):
            continue
        try:
            descriptors = [stream.fileno(), *([] if fallback is None else [fallback])]
        except (AttributeError, OSError):
            # None, or the stream of a test.
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        lossy = io.TextIOWrapper(
            io.BufferedWriter(_LossyOutput(descriptors)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
        )
        setattr(sys, name, PrintableStream(lossy) if isinstance(stream, PrintableStream) else lossy)
