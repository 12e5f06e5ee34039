"""Lets the garbage collector look for cycles less often while plans are searched for.

A search keeps what simulations have in common: millions of numbers in lists. The collector went through all of them
each time that they had become a quarter more, for a seventh of all planning, and found next to nothing, since what is
not needed any more goes away with the last one that knows it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

LESS_OFTEN = 300
"""It looks for cycles once in so many times. A heuristic: a few times in a minute of planning."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """The collector is as before afterwards; one that is switched off stays so."""
    before, *older = gc.get_threshold()
    gc.set_threshold(LESS_OFTEN * before, *older)
    try:
        yield
    finally:
        gc.set_threshold(before, *older)
