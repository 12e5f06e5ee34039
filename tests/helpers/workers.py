"""The workers of a run of the tests: pytest processes that share its files, forks of one that has imported torch.

    python -m tests.helpers.workers 3 -q --share-files=FOLDER      # three, with these arguments of pytest

torch and megatron-core are three seconds of a core, for each worker and for the fork server of its ranks. Here they are
imported once for all of them. Beside GPUs, which no fork can use once somebody has asked for them, each imports alone.

Exit code: that of pytest, where workers differ the largest.
"""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.early_fork_server import fork_server_early
from tests.helpers.rank_pool import fork_server

FAILED = 2
"""Exit code for a worker that a signal has ended; pytest's for a run that was interrupted."""


def main(argv: Sequence[str]) -> int:
    count, *words = argv
    # For the servers that are forked here, too.
    fork_server()
    if is_shared := not any(Path("/dev").glob("nvidia[0-9]*")):
        _import_for_all()
    workers: list[int] = []
    for _ in range(int(count)):
        if (worker := os.fork()) == 0:
            return _work(words, is_shared=is_shared)
        workers.append(worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _interrupt(workers))
    codes = []
    while workers:
        pid, status = os.wait()
        workers.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        codes.append(code if code >= 0 else FAILED)
    return max(codes)


def _import_for_all() -> None:
    """No torch operation runs: its threads do not fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hetero.runtime import cpu_backend  # noqa: PLC0415

        cpu_backend.install()
    gc.collect()
    gc.freeze()


def _work(words: list[str], *, is_shared: bool) -> int:
    if is_shared:
        fork_server_early()
    # A shell starts what runs in the background deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import pytest  # noqa: PLC0415  (no worker's plugin belongs to the others)

    return int(pytest.main(words))


def _interrupt(workers: Sequence[int]) -> None:
    for worker in workers:
        os.kill(worker, signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
