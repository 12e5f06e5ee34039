"""The ranks of a node in one epoch: starts them, notices their end, shows what they print, and ends them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from multiprocessing.process import BaseProcess
from pathlib import Path

from hetero.elastic.fork_server import ForkServer
from hetero.elastic.records import ASSIGNMENT_VARIABLE, STOP_FOR_GOOD, Epoch, RankAssignment
from hetero.errors import ConfigError
from hetero.private_files import open_for_writing, write_private
from hetero.serialization import read_bytes, to_json

_SHOW_EVERY_S = 0.1
_READ_AT_ONCE = 2**20
_SHOWN_OF_A_FAILURE = 2000
"""Characters."""


@dataclass(slots=True)
class _FollowedFile:
    """A file of output.

    file: stays open, so that lines are seen also after it was deleted.
    seen: bytes of it that have been shown.
    """

    file: FileIO
    prefix: str
    seen: int

    def read(self) -> bytes:
        """Read what is new; nothing where the file cannot be read now."""
        try:
            return os.pread(self.file.fileno(), _READ_AT_ONCE, self.seen)
        except OSError:
            return b""


class RankOutput:
    """Shows the lines that files of output grow by, each with the rank that wrote it before it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._files: list[_FollowedFile] = []

    def follow(self, path: Path, *, prefix: str) -> None:
        """Make a file unless it is there, and show it from where it ends now.

        Raises:
            OSError: it cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_for_writing(path, "a+")
        self._files.append(_FollowedFile(file, prefix, file.seek(0, os.SEEK_END)))

    def show_new(self, *, last: bool = False) -> None:
        """Show all whole lines that are new; with ``last`` what is left of a line too, and then no more."""
        for followed in self._files:
            new = followed.read()
            # A line that is longer than what is read at once would never end.
            is_cut = len(new) == _READ_AT_ONCE and b"\n" not in new
            whole = new if last or is_cut else new[: new.rfind(b"\n") + 1]
            for line in whole.decode(errors="replace").splitlines():
                self._show(f"{followed.prefix}{line}")
            followed.seen += len(whole)
        if last:
            for followed in self._files:
                with contextlib.suppress(OSError):
                    followed.file.close()
            self._files = []


class RankProcesses:
    """Attributes:
    epoch: that the ranks are of, 0 before the first.
    running: process by rank, of those that have not been seen to end.
    """

    def __init__(
        self, fork_server: ForkServer, *, on_end: Callable[[int, int, int], None], show: Callable[[str], None]
    ) -> None:
        """``on_end`` gets epoch, rank and exit code of a rank that has ended unasked or asked."""
        self.epoch = 0
        self.running: dict[int, BaseProcess] = {}
        self._fork_server = fork_server
        self._on_end = on_end
        self._output = RankOutput(show)
        self._store: BaseProcess | None = None

    async def show_output(self) -> None:
        """Show what ranks print until cancelled."""
        while True:
            self._output.show_new()
            await asyncio.sleep(_SHOW_EVERY_S)

    async def serve_store(self, host: str) -> int:
        """Have a store for the ranks of the next epoch, and return its port; the last one's ends."""
        self.end_store()
        self._store, port = await asyncio.to_thread(self._fork_server.start_store, host)
        return port

    def end_store(self) -> None:
        """End the store that this node serves, if it does."""
        if self._store is not None:
            self._store.kill()
            self._store.join()
            self._store = None

    async def run_alone(
        self, program: str, flags: Sequence[str], *, variables: Mapping[str, str], output: Path
    ) -> tuple[int, str]:
        """Run a program to its end, as no rank of anything; its exit code, and the end of what it printed."""
        # Where it cannot be made, the program prints on this agent's output.
        with contextlib.suppress(OSError):
            output.unlink(missing_ok=True)
        process = await asyncio.to_thread(
            self._fork_server.start_rank, program=program, flags=flags, variables=variables, output=str(output)
        )
        await asyncio.to_thread(process.join)
        code = process.exitcode
        process.close()
        assert code is not None
        if code == 0:
            return code, ""
        try:
            said = read_bytes(output).decode(errors="replace")[-_SHOWN_OF_A_FAILURE:].strip()
        except ConfigError:
            said = ""
        return code, said or "see what it printed above"

    def start(
        self, assignment: RankAssignment, *, program: str, flags: tuple[str, ...], files: Path, logs: Path
    ) -> None:
        """Start this node's ranks of the assignment's epoch.

        Args:
            files: folder for the assignment's file.
            logs: folder for what the ranks print; where it takes nothing, they print on this agent's output.

        Raises:
            OSError: the assignment's file cannot be written, or a process not be made; no rank runs then.
        """
        assert not self.running, "end the ranks of the last epoch first"
        epoch = assignment.epoch
        ranks = next(each.ranks for each in epoch.nodes if each.node.name == assignment.node)
        path = files / f"assignment_{epoch.number:08d}.json"
        write_private(path, to_json(assignment))
        try:
            for local_rank, rank in enumerate(ranks):
                output = logs / f"epoch_{epoch.number:08d}" / f"rank_{rank:05d}.log"
                variables = _variables(epoch, assignment.node, rank, local_rank) | {ASSIGNMENT_VARIABLE: str(path)}
                self._start_rank(epoch.number, rank, program=program, flags=flags, variables=variables, output=output)
        except OSError:
            # All ranks or none, so that they can be started again.
            for process in self._kill_running():
                process.join()
                process.close()
            self._output.show_new(last=True)
            raise
        self.epoch = epoch.number

    def _start_rank(
        self,
        epoch: int,
        rank: int,
        *,
        program: str,
        flags: tuple[str, ...],
        variables: Mapping[str, str],
        output: Path,
    ) -> None:
        # The event log says that logs cannot be written.
        with contextlib.suppress(OSError):
            self._output.follow(output, prefix=f"[epoch {epoch} rank {rank}] ")
        process = self._fork_server.start_rank(program=program, flags=flags, variables=variables, output=str(output))
        self.running[rank] = process
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, epoch, rank, process)

    def stop(self, *, is_for_good: bool) -> None:
        """Ask all ranks to finish the step in hand, commit it, and end; if ``is_for_good``, to save it as well."""
        for process in self.running.values():
            if process.pid is not None and process.exitcode is None:
                # The fork server takes note of an end before this process hears of it.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, STOP_FOR_GOOD if is_for_good else signal.SIGTERM)

    async def wait(self, seconds: float) -> None:
        """Wait until all ranks have ended by themselves, but no longer than ``seconds``."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """End all ranks now, and wait until they are gone; ``on_end`` is not called for them."""
        for process in self._kill_running():
            await asyncio.to_thread(process.join)
            process.close()
        self._output.show_new(last=True)

    def _kill_running(self) -> list[BaseProcess]:
        """Kill all ranks, and return their processes, which count no more."""
        ending, self.running = list(self.running.values()), {}
        for process in ending:
            asyncio.get_running_loop().remove_reader(process.sentinel)
            process.kill()
        return ending

    def _ended(self, epoch: int, rank: int, process: BaseProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        code = process.exitcode
        assert code is not None
        self.running.pop(rank, None)
        process.close()
        self._output.show_new(last=not self.running)
        self._on_end(epoch, rank, code)


def _variables(epoch: Epoch, node: str, rank: int, local_rank: int) -> dict[str, str]:
    """What torchrun would tell a rank."""
    ranks = next(each.ranks for each in epoch.nodes if each.node.name == node)
    position = next(index for index, each in enumerate(epoch.nodes) if each.node.name == node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(len(each.ranks) for each in epoch.nodes)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
        "GROUP_RANK": str(position),
        "MASTER_ADDR": epoch.rendezvous_host,
        "MASTER_PORT": str(epoch.rendezvous_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
