"""Cuts a stream of JSON into its objects: those of an array, or those that follow one another over several lines."""

import re
from collections.abc import Iterator

from hetero.errors import ConfigError
from hetero.units import MIB
from megatron.pretrain.compression import Stream

# A quote that does not close within the buffer matches alone.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}]', re.DOTALL)
_BETWEEN = re.compile(rb"(?:[\s,]|\xef\xbb\xbf)*")


def json_objects(stream: Stream, *, limit_bytes: int, source: str) -> Iterator[bytes]:
    """Yield the text of each object that is not inside another one; what is in it, is not checked.

    Args:
        limit_bytes: of one object.
        source: names the stream in messages.

    Raises:
        ConfigError: something else than objects, or an object or the array that does not end.
    """
    buffer, is_in_array, num_objects = _Buffer(stream), False, 0
    while mark := buffer.next_mark():
        if mark == b"{":
            num_objects += 1
            text = buffer.take_object(limit_bytes)
            if text is None:
                wrong = f"does not end, or has more than {limit_bytes:,} bytes"
                raise ConfigError(f"{source}: object {num_objects} {wrong}; is the file complete?")
            yield text
        elif mark == (b"]" if is_in_array else b"["):
            is_in_array = not is_in_array
            buffer.skip()
        else:
            where = f"after object {num_objects}" if num_objects else "at its beginning"
            raise ConfigError(f"{source}: holds {mark.decode('latin-1')!r} {where}, where only JSON objects may be")
    if is_in_array:
        raise ConfigError(f"{source}: its array does not end after object {num_objects}; is the file complete?")


class _Buffer:
    """Holds what has been read of a stream and not been handed out."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._content = b""
        self._start = 0

    def next_mark(self) -> bytes:
        """Return the next byte that is neither white space nor a comma, without taking it; ``b""`` at the end."""
        while True:
            match = _BETWEEN.match(self._content, self._start)
            self._start = match.end() if match else self._start
            if self._start < len(self._content) or not self._read_on():
                return self._content[self._start : self._start + 1]

    def skip(self) -> None:
        """Take one byte."""
        self._start += 1

    def take_object(self, limit_bytes: int) -> bytes | None:
        """Take the object that begins here; ``None`` if it does not end within the stream and about the limit."""
        depth, position = 0, 0
        while True:
            match = _MARK.search(self._content, self._start + position)
            if match is None or match[0] == b'"':
                position = (match.start() if match else len(self._content)) - self._start
                if len(self._content) - self._start > limit_bytes or not self._read_on():
                    return None
                continue
            depth += {b"{": 1, b"}": -1}.get(match[0], 0)
            position = match.end() - self._start
            if depth == 0:
                text = self._content[self._start : match.end()]
                self._start = match.end()
                return text

    def _read_on(self) -> bool:
        """Read as much again as there is, so that an object of any length is copied a few times only."""
        rest = self._content[self._start :]
        more = self._stream.read(max(MIB, len(rest)))
        self._content, self._start = rest + more, 0
        return bool(more)
