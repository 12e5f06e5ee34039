"""Runs a function on several CPU processes joined by gloo, in a fraction of a second.

    def check(rank: int, plan: Plan) -> int: ...        # module level, so that it can be pickled

    results = run_ranks(check, 4, plan)                 # results[rank]

A fork server imports torch and megatron-core once and each rank is a fork of it, so that a case pays neither. The
ranks meet through a file, not a port. A rank that fails ends the case at once with its own traceback; one that
hangs ends it after ``timeout_s`` with the stacks of all. Only processes started here are ever killed.
"""

import datetime
import faulthandler
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = ["tests.helpers.preload"]


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks and return what each returned."""
    context = _context()
    results: multiprocessing.Queue[tuple[int, bool, Any]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank_main, args=(function, rank, world_size, store, args, results, timeout_s))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            returned = _collect(ranks, results, time.monotonic() + timeout_s)
            for process in ranks:
                process.join(timeout=10)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
    return [returned[rank] for rank in range(world_size)]


def _collect(ranks: list[BaseProcess], results: Any, deadline: float) -> dict[int, Any]:
    returned: dict[int, Any] = {}
    while len(returned) < len(ranks):
        try:
            rank, succeeded, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = {r: p.exitcode for r, p in enumerate(ranks) if p.exitcode is not None and r not in returned}
            if dead:
                raise AssertionError(f"ranks ended without a result; exit codes {dead}") from None
            if time.monotonic() > deadline:
                waiting = sorted(set(range(len(ranks))) - set(returned))
                raise AssertionError(f"ranks {waiting} hung; their stacks are on stderr") from None
            continue
        if not succeeded:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        returned[rank] = value
    return returned


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: tuple[Any, ...],
    results: Any,
    timeout_s: float,
) -> None:
    import torch  # noqa: PLC0415  (already loaded by the fork server; this module must stay cheap to import)
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(timeout_s * 0.9, exit=False)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        value = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, True, value))
    except BaseException:  # noqa: BLE001  (whatever it was, the test has to hear of it)
        results.put((rank, False, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)
