"""Which thread waits for other ranks is read from its stack, and by that which rank stood still."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.distributed.standstill import (
    Position,
    main_thread_line,
    main_thread_stack,
    main_thread_waits,
    still_ranks,
)
from hetero.distributed.timing import wait_for_all

PATIENCE_S = 20.0


class Message:
    """Communication that ends when the test has looked."""

    def __init__(self) -> None:
        self.begun, self.come = threading.Event(), threading.Event()

    def wait(self) -> object:
        self.begun.set()
        # As a call into a library: no Python code of this module or of threading's is on the stack.
        return wait_in_c(self.come)

    def is_completed(self) -> bool:
        return self.come.is_set()


def wait_in_c(event: threading.Event) -> None:
    while not event.is_set():
        time.sleep(0.01)


def seen_while(call: Callable[[], object], begun: threading.Event, end: threading.Event) -> tuple[bool, str, str]:
    """What another thread sees of the main thread while that is in ``call``, which lasts until ``end``."""
    seen: list[tuple[bool, str, str]] = []

    def look() -> None:
        try:
            assert begun.wait(PATIENCE_S)
            # The thread that begins may not have come to its wait.
            time.sleep(0.1)
            seen.append((main_thread_waits(), main_thread_line(), main_thread_stack()))
        finally:
            end.set()

    other = threading.Thread(target=look)
    other.start()
    call()
    other.join()
    return seen[0]


def test_a_thread_that_waits_for_a_message_waits() -> None:
    message = Message()
    waits, line, stack = seen_while(lambda: wait_for_all([message]), message.begun, message.come)
    assert waits
    assert "in wait_for_all" in line
    assert "wait_for_all([message])" in stack


def test_a_thread_that_computes_or_reads_does_not() -> None:
    begun, end = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        wait_in_c(end)

    waits, line, _ = seen_while(compute, begun, end)
    assert not waits
    assert line.startswith("test_standstill.py:")
    assert line.endswith(" in wait_in_c")


def test_a_thread_waits_for_ranks_where_the_thread_that_it_waits_for_does() -> None:
    message = Message()
    with ThreadPoolExecutor(1) as pool:
        waits, *_ = seen_while(lambda: pool.submit(wait_for_all, [message]).result(), message.begun, message.come)
    assert waits


def test_a_thread_does_not_wait_for_ranks_where_the_thread_that_it_waits_for_computes() -> None:
    begun, end = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        wait_in_c(end)

    with ThreadPoolExecutor(1) as pool:
        # It collects what the other thread computes, in the same call as messages.
        class Result:
            def wait(self) -> object:
                return pool.submit(compute).result()

            def is_completed(self) -> bool:
                return end.is_set()

        waits, *_ = seen_while(lambda: wait_for_all([Result()]), begun, end)
    assert not waits


def position(unchanged_s: float, *, waits: bool) -> Position:
    return Position(doing="training", unchanged_s=unchanged_s, waits=waits, line="a.py:1 in f")


@pytest.mark.parametrize(
    ("positions", "still"),
    [
        ({0: position(31, waits=True), 1: position(30, waits=False), 2: position(0.5, waits=False)}, [1]),
        ({0: position(30, waits=False), 1: position(31, waits=False), 2: position(60, waits=True)}, [1, 0]),
        ({0: position(31, waits=True), 1: position(30, waits=True)}, []),
    ],
    ids=["one computes", "two stand still", "all wait"],
)
def test_who_stood_still_waits_for_no_rank_and_has_not_moved_for_longest(
    positions: dict[int, Position], still: list[int]
) -> None:
    assert still_ranks(positions) == still
