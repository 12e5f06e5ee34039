"""Agents in the time of a fork: processes of the test's fork server, which has imported what agents import.

An agent imports for two seconds of a core, and its own fork server for seven more; the tests start nearly a hundred.
Here the fork server of an agent is a fork too (:mod:`tests.helpers.early_fork_server`). All else is as in
``hetero elastic agent``, with which `tests/elastic/test_commands.py` and the tests of Slurm start theirs.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.helpers.early_fork_server import fork_server_early
from tests.helpers.network_namespaces import Host
from tests.helpers.rank_pool import fork_server
from tests.helpers.sources import ROOT


class ForkedAgent:
    """An agent, with the methods of :class:`subprocess.Popen` that tests use. It leads a session of its own.

    Args:
        words: of the command line, after ``hetero``.
        variables: of the environment, for it and its ranks.
        host: on whose network it is, if not on this machine's.
    """

    def __init__(
        self, words: Sequence[str], *, output: Path, variables: Mapping[str, str], host: Host | None = None
    ) -> None:
        self._process: ForkServerProcess = fork_server().Process(
            target=_agent_main, args=(list(words), str(output), dict(variables), host)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """``None`` while it lives; minus the number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("hetero elastic agent", seconds or 0.0)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _agent_main(words: Sequence[str], output: str, variables: Mapping[str, str], host: Host | None) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ |= variables
    with Path(output).open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own text streams
    # As in a process that a shell has started.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["hetero", *words]
    with host.entered() if host is not None else contextlib.nullcontext():
        fork_server_early()
        from hetero.cli import main  # noqa: PLC0415  (not before this process is an agent's)

        sys.exit(main(list(words)))
