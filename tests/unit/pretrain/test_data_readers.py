"""Processes that read ahead of a rank: stop signals leave them running, and one that is lost is named."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import pytest
import torch

from hetero.errors import DataError
from hetero.runtime.microbatch import Microbatch
from megatron.pretrain.data_readers import read_ahead

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FORK = multiprocessing.get_context("fork")


def read_process_id(indices: Sequence[int]) -> Microbatch:
    ids = torch.full((len(indices), 4), os.getpid())
    return Microbatch(tokens_BS=ids, position_ids_BS=ids, labels_BS=ids, loss_mask_BS=ids.float())


def numbers() -> Iterator[list[int]]:
    return ([i] for i in range(1000))


@contextmanager
def first_read() -> Iterator[tuple[Iterator[Microbatch], list[psutil.Process]]]:
    """Two readers at work, what they read next, and their processes, without others that this process has started."""
    others = psutil.Process().children()
    batches = read_ahead(read_process_id, numbers(), num_workers=2, ahead=2)
    next(batches)
    yield batches, [child for child in psutil.Process().children() if child not in others]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_stop_signal_leaves_readers_running(number: signal.Signals) -> None:
    with first_read() as (batches, readers):
        for reader in readers:
            reader.send_signal(number)
        read_by = {int(next(batches).tokens_BS[0, 0]) for _ in range(100)}
    assert read_by == {reader.pid for reader in readers}


def signal_right_after_every_fork() -> None:
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    next(read_ahead(read_process_id, numbers(), num_workers=2, ahead=2))


def stop_with_readers() -> None:
    """What waits in a reader must not keep it, nor its rank, from ending."""
    with first_read() as (batches, readers):
        for reader in readers:
            reader.send_signal(signal.SIGTERM)
        # Held by the module: the interpreter ends while its readers still run.
        globals()["held"] = batches


@pytest.mark.parametrize("main", [signal_right_after_every_fork, stop_with_readers])
def test_a_rank_ends_as_it_should(main: Callable[[], None]) -> None:
    rank = FORK.Process(target=main)
    rank.start()
    rank.join(timeout=60)
    code = rank.exitcode
    rank.kill()
    assert code == 0


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, r"killed by SIGKILL \(the kernel does so when the host is out of memory\)"),
        (signal.SIGBUS, r"killed by SIGBUS \(it gets that when shared memory"),
    ],
)
def test_a_lost_reader_is_named(number: signal.Signals, cause: str) -> None:
    """Where its microbatch is due, and nowhere else: torch's handler of SIGCHLD would raise in any line."""
    before = signal.getsignal(signal.SIGCHLD)
    with first_read() as (batches, readers):
        assert signal.getsignal(signal.SIGCHLD) == before
        victim = readers[1]
        victim.send_signal(number)
        said = rf"^data reader [01] \(process {victim.pid}\) was {cause}.*--num-workers \(now 2\)"
        with pytest.raises(DataError, match=said):
            list(batches)


def test_an_error_in_a_reader_is_the_ranks_own() -> None:
    def read(indices: Sequence[int]) -> Microbatch:
        raise DataError("corpus.bin: gone")

    for num_workers in (0, 2):
        with pytest.raises(DataError, match=r"^corpus\.bin: gone$"):
            next(read_ahead(read, numbers(), num_workers=num_workers, ahead=2))
