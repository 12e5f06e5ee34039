"""Runs a function on several CPU processes joined by gloo, in a fraction of a second.

    def check(rank: int, plan: Plan) -> int: ...        # module level, so that it can be pickled

    results = run_ranks(check, 4, plan)                 # results[rank]
    result = run_alone(check, plan)                     # one process, which is asked the same only once

The ranks come from a pool that lives through the test run (:mod:`tests.helpers.rank_pool`). A rank that fails ends the
case at once with its own traceback; one that hangs ends it after ``timeout_s`` with the stacks of all.

Where ranks are meant to die, :func:`end_of_ranks` forks fresh ones and tells how and when each ended, and what it said.
"""

import functools
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from tests.helpers.rank_pool import RankPool, fork_server


@dataclass(slots=True)
class Answers:
    """Where the processes of a run keep what :func:`run_alone` was told; ``None`` is nowhere."""

    folder: Path | None = None


ANSWERS = Answers()
POOL = RankPool()
"""Of this process; `scripts/test.sh` has one for each worker."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks and return what each returned."""
    return POOL.run(function, world_size, args, timeout_s=timeout_s)


@functools.lru_cache(maxsize=96)
def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(0, *args)`` returns in one process.

    It is asked once for all test files of this process, and of those that share files with it: all that determines the
    result must be in ``args``, and nobody may change what comes back.
    """
    call = pickle.dumps((function, args))
    kept = ANSWERS.folder / f"answer-{hashlib.sha256(call).hexdigest()}" if ANSWERS.folder is not None else None
    if kept is not None and kept.exists():
        return pickle.loads(kept.read_bytes())
    (result,) = run_ranks(function, 1, *args)
    if kept is not None:
        # Whole from the first moment at which another process can see it.
        (written := kept.with_suffix(f".{os.getpid()}")).write_bytes(pickle.dumps(result))
        written.replace(kept)
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank ended.

    exit_code: negative for the signal that killed it.
    at_s: when, by ``time.monotonic()``, which is one clock for all processes; ``None`` if it had to be killed here.
    """

    exit_code: int | None
    at_s: float | None
    stderr: str


def end_of_ranks(
    function: Callable[..., None],
    world_size: int,
    *args: Any,
    store_host: Literal["launcher", "rank 0"] = "launcher",
    lasting: Container[int] = (),
    gpu_environment: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> list[Ended]:
    """Call ``function(rank, store, *args)`` on ``world_size`` ranks and wait until all have ended.

    The exit code of a rank is 0 if it returns, 1 if it raises. ``store`` is the launch's TCP store, as a rank knows
    it from torchrun, unless rank 0 hosts it. Ranks in ``lasting`` are not waited for, but killed after the others'
    end; so is, after ``timeout_s``, who hangs. With ``gpu_environment``, ranks are new processes with these variables
    and with GPUs in turns, joined by NCCL beside gloo.
    """
    on_gpu = gpu_environment is not None
    context: BaseContext = multiprocessing.get_context("spawn") if on_gpu else fork_server()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = _serve_store(folder) if store_host == "launcher" else None
        ranks = [
            context.Process(  # type: ignore[attr-defined]  # every context has one, which the base does not say
                target=_mortal_rank_main, args=(function, rank, world_size, folder, store_host, on_gpu, args)
            )
            for rank in range(world_size)
        ]
        # Before torch is imported there.
        with mock.patch.dict(os.environ, gpu_environment or {}):
            for process in ranks:
                process.start()
        try:
            ended_at = _wait_for_ends(ranks, lasting, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        del store
        return [
            Ended(exit_code=process.exitcode, at_s=ended_at.get(rank), stderr=_stderr(folder, rank).read_text())
            for rank, process in enumerate(ranks)
        ]


def _wait_for_ends(ranks: list[BaseProcess], lasting: Container[int], deadline: float) -> dict[int, float]:
    ended_at: dict[int, float] = {}
    while running := {p.sentinel: rank for rank, p in enumerate(ranks) if rank not in ended_at}:
        if all(rank in lasting for rank in running.values()) or time.monotonic() > deadline:
            break
        for sentinel in multiprocessing.connection.wait(list(running), timeout=0.2):
            assert isinstance(sentinel, int)
            ended_at[running[sentinel]] = time.monotonic()
    return ended_at


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _mortal_rank_main(
    function: Callable[..., None],
    rank: int,
    world_size: int,
    folder: Path,
    store_host: str,
    on_gpu: bool,
    args: tuple[Any, ...],
) -> None:
    import torch  # noqa: PLC0415  (already loaded by the fork server; this module must stay cheap to import)
    import torch.distributed as dist  # noqa: PLC0415

    with _stderr(folder, rank).open("w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    hosts = store_host == f"rank {rank}"
    store = _serve_store(folder) if hosts else _reach_store(folder)
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=world_size,
    )
    try:
        function(rank, store, *args)
    finally:
        dist.destroy_process_group()


def _serve_store(folder: Path) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    partial = folder / "port.partial"
    partial.write_text(str(store.port))
    partial.replace(folder / "port")
    return store


def _reach_store(folder: Path) -> Any:
    import torch.distributed as dist  # noqa: PLC0415

    port = folder / "port"
    while not port.exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)
