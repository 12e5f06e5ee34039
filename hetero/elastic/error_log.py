"""Writes what libraries log about errors to standard error, at a limited rate: no stranger can fill a disk with it.

asyncio, aiohttp and urllib3 log an error per connection or request that goes wrong, with its traceback.
"""

import logging
import sys
import time
from collections.abc import Callable

from hetero.peer_limits import ERRORS_PER_MINUTE
from hetero.printable import printable_lines

_MINUTE_S = 60.0

_MOST_CHARACTERS = 8000
"""Of one error with its traceback."""


class ErrorLog(logging.Handler):
    """Writes :data:`hetero.peer_limits.ERRORS_PER_MINUTE` records a minute, and counts the others.

    Args:
        write: takes text that ends with its line.
        clock: seconds.
    """

    def __init__(self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("hetero: %(name)s: %(message)s"))
        self._write = write
        self._clock = clock
        self._minute_ends_s = 0.0
        self._written = self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the minute has had enough of them."""
        now_s = self._clock()
        if now_s >= self._minute_ends_s:
            if self._left_out:
                self._write(f"hetero: {self._left_out:,} more errors like these were not written\n")
            self._minute_ends_s, self._written, self._left_out = now_s + _MINUTE_S, 0, 0
        if self._written >= ERRORS_PER_MINUTE:
            self._left_out += 1
            return
        self._written += 1
        text = printable_lines(self.format(record))
        shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
        self._write(f"{shown}\n")


def limit_error_log() -> None:
    """Have all loggers of this process that have no handler of their own write through an :class:`ErrorLog`."""
    logging.getLogger().addHandler(ErrorLog(lambda text: sys.stderr.write(text)))
