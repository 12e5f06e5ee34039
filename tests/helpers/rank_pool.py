"""A pool of rank processes that lives through the test run: a case pays neither for imports nor for forks.

A fork server imports torch and megatron-core once; each worker is a fork of it and runs one case after the other. Every
case has a process group of its own, over a prefix of one store that this process serves. After a case the worker says
what it has left behind (:mod:`tests.helpers.process_state`). A worker with leftovers is replaced, and so is every
worker of a case that failed or hung. Only processes started here are ever killed.
"""

import atexit
import datetime
import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

PRELOAD = ["tests.helpers.preload"]
_READY = "ready"
_START_LIMIT_S = 60.0


def fork_server() -> ForkServerContext:
    """Forks of a process that has imported everything, with one thread each and the loopback interface."""
    context = multiprocessing.get_context("forkserver")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context.set_forkserver_preload(PRELOAD)
    return context


@dataclass(frozen=True, slots=True)
class _Case:
    """What a worker is to do. ``call`` is the pickled function with its arguments behind the rank."""

    number: int
    rank: int
    world_size: int
    call: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """value: what the function returned. error: the traceback if it raised. left: what makes the worker unfit for
    another case."""

    value: Any = None
    error: str | None = None
    left: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    stacks: Path

    def kill(self) -> None:
        self.connection.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.stacks.unlink(missing_ok=True)


class RankPool:
    """Idle workers, and the store that cases meet over.

    Attributes:
        replaced: what workers had left behind when they were replaced, by the name of the function that they ran.
    """

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._folder: Path | None = None
        self._store: Any = None
        self._numbers = itertools.count()
        self.replaced: list[tuple[str, tuple[str, ...]]] = []

    def run(self, function: Callable[..., Any], world_size: int, args: Sequence[Any], timeout_s: float) -> list[Any]:
        """What ``function(rank, *args)`` returns on each of ``world_size`` ranks.

        Raises:
            AssertionError: a rank raised, ended or hung; with its traceback, where there is one.
        """
        workers = self._take(world_size)
        try:
            deadline = time.monotonic() + timeout_s
            call = pickle.dumps((function, tuple(args)))
            number = next(self._numbers)
            for rank, worker in enumerate(workers):
                worker.connection.send(_Case(number, rank, world_size, call, timeout_s))
            answers = _collect(workers, deadline)
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        for worker, answer in zip(workers, answers, strict=True):
            if answer.left:
                self.replaced.append((getattr(function, "__qualname__", str(function)), answer.left))
                worker.kill()
            else:
                self._idle.append(worker)
        return [answer.value for answer in answers]

    def close(self) -> None:
        """End all workers; the next case starts new ones."""
        while self._idle:
            self._idle.pop().kill()

    def _end(self) -> None:
        self.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _take(self, count: int) -> list[_Worker]:
        address, folder = self._address(), self._made_folder()
        started = [
            _start_worker(address, folder / f"stacks-{next(self._numbers)}") for _ in range(count - len(self._idle))
        ]
        self._idle += started
        # The time that a case may take does not begin before there is somebody to measure it.
        deadline = time.monotonic() + _START_LIMIT_S
        for worker in started:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"process {worker.process.pid}: not ready for a case within {_START_LIMIT_S:g} s")
            assert worker.connection.recv() == _READY
        taken, self._idle = self._idle[:count], self._idle[count:]
        return taken

    def _made_folder(self) -> Path:
        """At the first case: a process that only looks for tests leaves none."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        return self._folder

    def _address(self) -> tuple[str, int]:
        import torch.distributed as dist  # noqa: PLC0415  (this module must stay cheap to import)

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            atexit.register(self._end)
        return "127.0.0.1", self._store.port


def _start_worker(address: tuple[str, int], stacks: Path) -> _Worker:
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=_serve, args=(theirs, address, stacks))
    process.start()
    theirs.close()
    return _Worker(process, ours, stacks)


def _collect(workers: Sequence[_Worker], deadline: float) -> list[_Answer]:
    answers: dict[int, _Answer] = {}
    while len(answers) < len(workers):
        waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in answers}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            stacks = (f"rank {rank}:\n{workers[rank].stacks.read_text()}" for rank in waiting.values())
            raise AssertionError(f"ranks {sorted(waiting.values())} hung\n" + "\n".join(stacks))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                answer: _Answer = connection.recv()
            except EOFError:
                workers[rank].process.join()
                codes = {rank: workers[rank].process.exitcode}
                raise AssertionError(f"ranks ended without a result; exit codes {codes}") from None
            if answer.error is not None:
                raise AssertionError(f"rank {rank} failed:\n{answer.error}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(workers))]


# ---- in a worker


def _serve(connection: Connection, address: tuple[str, int], stacks: Path) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from tests.helpers.process_state import state_of_this_process  # noqa: PLC0415

    torch.set_num_threads(1)
    # Ranks wake one another some thousand times a step, by way of gloo's threads. Who is woken waits its turn here: if
    # it takes the core at once, both wait for one another more often, which costs a third of all seconds of a step.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    state = state_of_this_process()
    state.renew()
    file = stacks.open("w")
    connection.send(_READY)
    while True:
        try:
            case: _Case = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(case.timeout_s * 0.9, file=file)
        answer = _answer(case, store, state)
        faulthandler.cancel_dump_traceback_later()
        try:
            connection.send(answer)
        except Exception:  # noqa: BLE001  (its value cannot be pickled)
            answer = _Answer(error=traceback.format_exc())
            connection.send(answer)
        if answer.error is not None:
            # The others of this case are being killed; nobody asks this process again.
            os._exit(1)


def _answer(case: _Case, store: Any, state: Any) -> _Answer:
    import torch.distributed as dist  # noqa: PLC0415

    try:
        function, args = pickle.loads(case.call)
        state.begin()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case {case.number}", store),
            rank=case.rank,
            world_size=case.world_size,
            timeout=datetime.timedelta(seconds=case.timeout_s),
        )
        value = function(case.rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        return _Answer(value=value, left=tuple(state.end()))
    except BaseException:  # noqa: BLE001  (whatever it was, the test has to hear of it)
        return _Answer(error=traceback.format_exc())
