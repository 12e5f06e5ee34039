"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.01)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, however slow the machine is; the limit of the test ends the wait."""
    while not condition():
        time.sleep(0.1)
