"""Outlives a lack of file descriptors or of kernel memory: work that met it is done again, until it comes through.

Whoever opens most files when a limit is reached is not who has used them up, so any task of an agent may meet it.
"""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from hetero.peer_limits import descriptor_limit

T = TypeVar("T")

_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_RETRY_S = 0.3

_SAY_EVERY_S = 60.0


class Exhaustion:
    """What an agent does about a lack of descriptors or memory.

    Args:
        show: prints a line for people; called once a minute at most.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._said_s: float | None = None

    async def outlive(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``, and do it again as long as it fails for lack of descriptors or memory."""
        while True:
            try:
                return await work()
            except Exception as error:
                if not is_exhaustion(error):
                    raise
                self._say(error)
            await asyncio.sleep(_RETRY_S)

    def _say(self, error: Exception) -> None:
        now_s = time.monotonic()
        if self._said_s is None or now_s >= self._said_s + _SAY_EVERY_S:
            self._said_s = now_s
            self._show(f"hetero: {exhaustion_of(error)}; it is tried again")


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error, or one that it was raised for, is a lack of descriptors or memory."""
    return any(cause.errno in _ERRORS for cause in _causes(error))


def exhaustion_of(error: BaseException) -> str:
    """Return what is lacking, and what a user can do about it."""
    number = next(cause.errno for cause in _causes(error) if cause.errno in _ERRORS)
    if number == errno.EMFILE:
        return f"this process has {descriptor_limit():,} files open, its limit; raise that (ulimit -Hn, LimitNOFILE=)"
    if number == errno.ENFILE:
        return "this host has as many files open as it may; raise its limit (sysctl fs.file-max)"
    return f"the kernel of this host has no memory left ({os.strerror(number or 0)}); end what uses it up"


def _causes(error: BaseException | None) -> Iterator[OSError]:
    """All errors of the system that an error was raised for, hidden ones too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError):
            yield error
        error = error.__cause__ or error.__context__
