"""Sets signal handlers for as long as a block runs."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def signal_handlers(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handler`` take these signals, and restore the handlers that were set before. For the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
