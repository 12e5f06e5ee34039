"""Starts ranks in the time of a fork: a process that has imported torch and megatron-core waits for requests.

It is multiprocessing's fork server. Where a fork could not use CUDA, ranks are spawned instead, each with seconds of
imports. Everything that is started here ends with the process that started it, however that ends.
"""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from hetero.errors import ConfigError

_MODULE = "hetero.elastic.warm_ranks"
_PROGRAM_IMPORTS = "megatron.pretrain.training"
"""What ``pretrain_gpt.py`` imports. By name: it lies above this package."""

_PLANNING = "hetero.elastic.planning_service"

_WARM_WITHIN_S = 120.0


class ForkServer:
    """Attributes:
    seconds_to_warm: from the start of the server until its first fork had run.
    fallback: why ranks are spawned and not forked; empty if they are forked.
    context: starts other processes in the same way.
    """

    def __init__(self) -> None:
        self.seconds_to_warm = 0.0
        self.fallback = ""
        self.context: ForkServerContext | SpawnContext = multiprocessing.get_context("forkserver")
        self._parent: int | None = None

    def start(self) -> None:
        """Start the server, which then imports; call it from the main thread, with which the server will end."""
        multiprocessing.forkserver.set_forkserver_preload(["__main__", _MODULE, _PROGRAM_IMPORTS, _PLANNING])
        multiprocessing.forkserver.ensure_running()

    def warm_up(self) -> None:
        """Wait until the server has imported everything, and see whether its forks can use CUDA; blocks for seconds.

        Raises:
            ConfigError: no process could be started.
        """
        began = time.monotonic()
        problem, self._parent = self._ask("probe_cuda")
        if problem:
            self.fallback = problem
            self.context, self._parent = multiprocessing.get_context("spawn"), os.getpid()
        self.seconds_to_warm = time.monotonic() - began

    def start_rank(
        self, *, program: str, flags: Sequence[str], variables: Mapping[str, str], output: str
    ) -> BaseProcess:
        """A process that runs ``program`` with the ``variables`` of a launcher; what it prints goes to ``output``."""
        return self._started("run_rank", program, tuple(flags), dict(variables), output)

    def start_store(self, host: str) -> tuple[BaseProcess, int]:
        """A process that serves a store for ranks on ``host``, and its port.

        Raises:
            ConfigError: it could not listen there.
        """
        mine, theirs = multiprocessing.Pipe(duplex=False)
        process = self._started("serve_store", host, theirs)
        theirs.close()
        try:
            if not mine.poll(_WARM_WITHIN_S):
                raise EOFError
            return process, int(mine.recv())
        except EOFError:
            process.kill()
            process.join()
            raise ConfigError(
                f"the ranks' store cannot listen on {host}; give the address by which others reach this node (--host)"
            ) from None

    def _ask(self, name: str) -> Any:
        mine, theirs = multiprocessing.Pipe(duplex=False)
        process = self._started(name, theirs)
        theirs.close()
        try:
            if not mine.poll(_WARM_WITHIN_S):
                raise EOFError
            return mine.recv()
        except EOFError:
            raise ConfigError("the fork server of the ranks has ended; look at what it printed above") from None
        finally:
            process.kill()
            process.join()

    def _started(self, name: str, *args: object) -> BaseProcess:
        parent = 0 if self._parent is None else self._parent
        process = self.context.Process(target=_call, args=(name, args, parent))
        process.start()
        return process


def _call(name: str, args: Sequence[Any], parent: int) -> None:
    """In the new process: this module itself, which the agent imports too, knows no torch."""
    function: Callable[..., None] = getattr(importlib.import_module(_MODULE), name)
    function(*args, parent or os.getppid())
