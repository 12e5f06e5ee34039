"""Ends processes in time, names the exit code of those that end because of another one; needs no torch."""

import atexit
import contextlib
import gc
import signal
from collections.abc import Iterator

EXIT_CODE = 3
"""Exit code of a rank that ended because another one was lost."""

EXIT_WITHIN_S = 30.0
"""How long a process may take to end once its work is done or has failed."""


@contextlib.contextmanager
def bounded_exit(*, within_s: float = EXIT_WITHIN_S) -> Iterator[None]:
    """Around the main function of a process: what hangs on the way out is ended by the kernel after ``within_s``.

    Such as a thread that waits for a lost rank: the interpreter waits for it in turn.
    """
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, within_s)


def freeze_objects() -> None:
    """Leave all objects that exist by now out of garbage collections, until the process ends.

    There they are thawed: Triton's bindings would find their own alive, and print a page about them.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
