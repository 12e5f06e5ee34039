"""Sockets on which the processes of a run listen, as the kernel lists them, each with its row of the table."""

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.listening import ALL_INTERFACES, LISTENING_SOCKETS, ListeningSocket, is_loopback

RUN_VARIABLE = "HETERO_TEST_RUN"
"""A variable that all processes of a run inherit, from Slurm's tasks to forks of a fork server."""

_ROWS = {row.name: row for row in LISTENING_SOCKETS}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class FoundSocket:
    """A socket that waits for connections, or for datagrams under a name.

    row: name of its row of the table, empty if the table does not list it.
    address: an IP address, or the path of a Unix socket.
    is_private: no other user may connect to it, by the modes of its path.
    """

    row: str
    address: str
    port: int
    process: str
    is_private: bool = False

    @property
    def listed(self) -> ListeningSocket | None:
        return _ROWS.get(self.row)

    @property
    def is_as_listed(self) -> bool:
        """Whether it can be reached by those alone that the table says."""
        if self.listed is None:
            return False
        if self.listed.reach == "one user":
            return self.is_private
        if self.listed.reach == "loopback":
            return is_loopback(self.address)
        return (self.address in ALL_INTERFACES) == (self.listed.reach == "all interfaces")


def processes_of(run: str) -> list[psutil.Process]:
    """All processes that were started with the variable, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_VARIABLE) == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda each: (each.create_time(), each.pid))


def sockets_of(run: str) -> list[FoundSocket]:
    """Every socket on which a process of the run waits, once; one that forks have inherited is that of the oldest."""
    found: dict[tuple[str, int], FoundSocket] = {}
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error, OSError):
            for each in _sockets(process):
                found.setdefault((each.address, each.port), each)
    return sorted(found.values())


def counted(sockets: list[FoundSocket]) -> dict[tuple[str, str], int]:
    """How many sockets of each row listen on each address; Unix sockets are counted by row."""
    return dict(Counter((each.row, each.address if each.port else "") for each in sockets))


def kill_processes_of(run: str) -> None:
    """Kill what is left of a run."""
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _sockets(process: psutil.Process) -> Iterator[FoundSocket]:
    role, words = _role(process), process.cmdline()
    for each in process.net_connections(kind="all"):
        if each.family == socket.AF_UNIX:
            path = str(each.laddr)
            # Without a path it is one end of a pair, or the client of another.
            if path.startswith("/"):
                row, is_private = _unix_row(role, path), _is_private(Path(path))
                yield FoundSocket(row=row, address=path, port=0, process=role, is_private=is_private)
        elif each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr):
            row = _row(role, each.laddr.port, words)
            yield FoundSocket(row=row, address=each.laddr.ip, port=each.laddr.port, process=role)


def _is_private(path: Path) -> bool:
    """Whether its user alone can connect, which takes the right to write."""
    return not path.parent.stat().st_mode & 0o077 or not path.stat().st_mode & 0o022


def _role(process: psutil.Process) -> str:
    """What a process is in a run; its program if it is nothing that we know."""
    words, parent = process.cmdline(), process.parent()
    if "elastic agent" in " ".join(words[:6]):
        return "agent"
    if any("multiprocessing.forkserver" in word for word in words):
        if parent is not None and _role(parent) == "agent":
            return "fork server"
        output = Path(f"/proc/{process.pid}/fd/1").readlink()
        return "rank" if output.parent.name.startswith("epoch_") else "store"
    if any(word.endswith("/torchrun") or word == "torch.distributed.run" for word in words[:4]):
        return "torchrun"
    if any(word.endswith("pretrain_gpt.py") for word in words[:4]):
        return "reader" if parent is not None and _role(parent) in ("rank", "reader") else "rank"
    return Path(words[0]).name if words else process.name()


def _row(role: str, port: int, words: list[str]) -> str:
    """The name of the row of a socket with a port."""
    if role == "rank":
        asked = words.index("--hetero-metrics-port") + 1 if "--hetero-metrics-port" in words else 0
        return "metrics" if asked and words[asked] == str(port) else "gloo"
    if role == "etcd":
        clients = next(word for word in words if word.startswith("--listen-client-urls"))
        return "etcd" if clients.endswith(f":{port}") else "etcd peers"
    rows = {"torchrun": "store of torchrun", "store": "store of an epoch", "agent": "copies", "srun": "srun"}
    return rows.get(role, "")


def _unix_row(role: str, path: str) -> str:
    rows = {"agent": "reports of ranks", "fork server": "fork server", "reader": "data readers"}
    name = {"agent": "reports.sock", "fork server": "listener-", "reader": "listener-"}.get(role, "none")
    return rows[role] if Path(path).name.startswith(name) else ""
