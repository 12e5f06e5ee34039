"""Reads microbatches ahead of a rank, in processes that live as long as the rank, and reports one that is lost.

Source: ``torch.utils.data.DataLoader`` of torch 2.13, which starts its workers when it is iterated.
"""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from hetero.distributed.helper_processes import HelperContext
from hetero.errors import DataError, HeteroError
from hetero.runtime.microbatch import Microbatch

_ENDING_S = 5.0

_LIKELY_CAUSES = {
    signal.SIGKILL: "the kernel does so when the host is out of memory",
    signal.SIGBUS: "it gets that when shared memory (/dev/shm) is full",
}


class _Readings(Dataset[Microbatch | HeteroError]):
    """Microbatches by the numbers of their samples. An error is a value: torch would wrap it in a traceback."""

    def __init__(self, read: Callable[[Sequence[int]], Microbatch]) -> None:
        self._read = read

    def __getitem__(self, indices: Sequence[int]) -> Microbatch | HeteroError:
        try:
            return self._read(indices)
        except HeteroError as error:
            return error


def read_ahead(
    read: Callable[[Sequence[int]], Microbatch],
    batches: Iterator[Sequence[int]],
    *,
    num_workers: int,
    ahead: int,
) -> Iterator[Microbatch]:
    """Yield ``read`` of each of ``batches`` in order, called in ``num_workers`` processes; in this one if that is 0.

    Args:
        batches: the numbers of the samples of each microbatch.
        ahead: microbatches to keep ready.

    Raises:
        DataError: a reader has ended before its time.
        HeteroError: as ``read`` does.
    """
    context = HelperContext() if num_workers else None
    loader = DataLoader(
        _Readings(read),
        batch_size=None,
        # It asks for no length, and is gone through once.
        sampler=cast("Any", batches),
        num_workers=num_workers,
        prefetch_factor=math.ceil(ahead / num_workers) + 1 if num_workers else None,
        # A rank that a fork server started would start its readers by another one, which imports everything anew.
        multiprocessing_context=context,
        # A loader draws a seed for its workers. From the global generator, that would shift the random numbers of
        # the ranks that read data against those that do not.
        generator=torch.Generator(),
    )
    readings = _started(loader)
    try:
        while True:
            try:
                reading = next(readings)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                lost = "" if context is None else _lost_readers(context)
                if not lost:
                    raise
                raise DataError(
                    f"{lost}; start again, with a smaller --num-workers (now {num_workers}) or --num-workers 0 if the "
                    "host is short of memory"
                ) from error.with_traceback(None)
            if isinstance(reading, HeteroError):
                raise reading
            yield reading
    finally:
        # Here and not with the traceback, as garbage: then its queues close before it can tell the processes to end,
        # and it waits 5 s for each of them.
        del readings, loader


def _started(loader: "DataLoader[Microbatch | HeteroError]") -> Iterator[Microbatch | HeteroError]:
    """Iterate over ``loader``, which starts its processes, and leave SIGCHLD as it was.

    torch's handler raises wherever the rank is when a reader ends: an error in a finalizer is lost, and one within a
    collective leaves the other ranks in it. Without it the loader notices when it waits for what that reader reads.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    handler = signal.getsignal(signal.SIGCHLD)
    readings = iter(loader)
    signal.signal(signal.SIGCHLD, handler)
    return readings


def _lost_readers(context: HelperContext) -> str:
    """Describe the readers that did not end by themselves; empty if there are none."""
    # The connection to one that is being killed breaks before it has ended.
    ended = wait([process.sentinel for process in context.started], timeout=_ENDING_S)
    for process in context.started:
        if process.sentinel in ended:
            # Its files are closed a moment before its exit code is known.
            process.join()
    lost = []
    for number, process in enumerate(context.started):
        code = process.exitcode
        if code is None or code == 0:
            continue
        ending = f"ended with exit code {code}"
        if code < 0:
            number_of_signal = signal.Signals(-code)
            cause = _LIKELY_CAUSES.get(number_of_signal)
            ending = f"was killed by {number_of_signal.name}" + (f" ({cause})" if cause else "")
        lost.append(f"data reader {number} (process {process.pid}) {ending}")
    return " and ".join(lost)
