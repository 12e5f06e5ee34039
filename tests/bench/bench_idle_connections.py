"""Measures an elastic job on one machine while strangers hold connections to every port that its processes listen on.

    python -m tests.bench.bench_idle_connections [--idle 5000] [--half-sent 2200] [--descriptors 1024] [--seconds 60]

``hetero elastic run`` starts two nodes under a limit of open files, soft and hard. Then each listening port gets a
process that keeps ``--idle`` connections which say nothing, and ``--half-sent`` ones with the beginning of a request;
of those that are closed it opens 200 a second again. Printed are, before and under the siege: steps a second,
milliseconds of an honest request to a server of copies (each on a fresh connection), bytes of log a minute, which
processes have ended, and for each port what held it and how many connections it kept.

Strangers and ranks compute on the same cores: on a machine with few, the steps a second are a lower bound.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import resource
import selectors
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from hetero.elastic.copy_client import CopyClient
from hetero.elastic.records import RankAssignment
from hetero.errors import CheckpointError
from hetero.serialization import load
from tests.helpers.elastic_training import elastic_words

_HALF = b"GET / HTTP/1.1\r\nHost: a\r\nX: "
_REOPENED_PER_S = 200
_OPENED_AT_ONCE = 50
_STEP = re.compile(rb"^step +(\d+)/", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Port:
    """A listening socket, and what the process behind it is."""

    host: str
    number: int
    holder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was seen in some seconds."""

    steps_per_s: float
    answers_ms: list[float]
    failures: int
    log_bytes_per_minute: float

    def __str__(self) -> str:
        answers = "no answer"
        if self.answers_ms:
            p50, most = statistics.median(self.answers_ms), max(self.answers_ms)
            answers = f"copies answer in p50 {p50:.1f} ms, max {most:.0f} ms ({len(self.answers_ms)} requests)"
        return (
            f"{self.steps_per_s:.1f} steps/s; {answers}, {self.failures} failed; "
            f"log {self.log_bytes_per_minute / 1000:,.0f} kB a minute"
        )


class Job:
    """An elastic run of two nodes, with all that it writes in one folder."""

    def __init__(self, folder: Path, *, descriptors: int) -> None:
        self.name = f"bench-idle-{os.getpid()}"
        self.folder = folder / "logs"
        self.folder.mkdir()
        words = elastic_words(folder, steps=1_000_000)
        command = [sys.executable, "-m", "hetero", "elastic", "run", "--nodes", "2", "--job", self.name]
        command += ["--logs", str(self.folder), "--", *words]
        with (self.folder / "run.out").open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-c", f"ulimit -n {descriptors}; exec {shlex.join(command)}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def steps(self) -> int:
        """The last step of rank 0 in the newest epoch, 0 before the first; earlier epochs count in full."""
        total = 0
        for log in self.folder.glob("*/epoch_*/rank_00000.log"):
            found = _STEP.findall(log.read_bytes())
            total += len(found)
        return total

    def epochs(self) -> int:
        """Epochs that have begun: each after the first one is a recovery."""
        return len({path.name for path in self.folder.glob("*/epoch_*")})

    def log_bytes(self) -> int:
        return sum(
            path.stat().st_size for path in self.folder.rglob("*") if path.is_file() and "etcd" not in path.parts
        )

    def processes(self) -> list[psutil.Process]:
        """All that live; none once the run is over."""
        with contextlib.suppress(psutil.NoSuchProcess):
            run = psutil.Process(self.process.pid)
            return [each for each in (run, *run.children(recursive=True)) if each.status() != psutil.STATUS_ZOMBIE]
        return []

    def ports(self) -> list[Port]:
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        found[each.laddr.ip, each.laddr.port] = Port(each.laddr.ip, each.laddr.port, _what(process))
        return list(found.values())

    def assignment(self) -> RankAssignment:
        """Of the newest epoch; it has the token, and where copies are served."""
        paths = sorted(Path("/dev/shm").glob(f"hetero-{self.name}-*/assignment_*.json"), key=lambda path: path.name)
        return load(RankAssignment, paths[-1])

    def client(self) -> CopyClient:
        assignment = self.assignment()
        return CopyClient(
            assignment.epoch.nodes[0].node, job=assignment.job, token=assignment.token, trust=assignment.trust
        )

    def measure(self, seconds: float) -> Figures:
        steps, size, began_s = self.steps(), self.log_bytes(), time.monotonic()
        answers_ms, failures = [], 0
        while time.monotonic() < began_s + seconds:
            asked_s = time.monotonic()
            with contextlib.closing(self.client()) as client:
                try:
                    client.inventory()
                    answers_ms.append(1000 * (time.monotonic() - asked_s))
                except CheckpointError:
                    failures += 1
            time.sleep(0.1)
        took_s = time.monotonic() - began_s
        return Figures(
            steps_per_s=(self.steps() - steps) / took_s,
            answers_ms=answers_ms,
            failures=failures,
            log_bytes_per_minute=(self.log_bytes() - size) * 60 / took_s,
        )

    def end(self) -> None:
        """End all that was started."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        for folder in Path("/dev/shm").glob(f"hetero-{self.name}-*"):
            subprocess.run(["rm", "-r", str(folder)], check=False)


def _what(process: psutil.Process) -> str:
    """Name a process by what of it one knows from outside."""
    with contextlib.suppress(OSError):
        output = Path(f"/proc/{process.pid}/fd/1").readlink()
        if output.name.startswith("rank_"):
            return f"{output.parents[1].name}, {output.stem}"
    words = process.cmdline()
    return "agent" if "agent" in words else process.name() if process.name() == "etcd" else "store or fork of an agent"


def _besiege(port: Port, idle: int, half_sent: int, kept_to: Connection) -> None:
    """Hold connections to a port until ended; tells once a second how many are open."""
    selector = selectors.DefaultSelector()
    is_half: dict[socket.socket, bool] = {}
    missing = [False] * idle + [True] * half_sent
    credit, filled_s, told_s = float(len(missing)), time.monotonic(), 0.0
    while True:
        now_s = time.monotonic()
        credit, filled_s = min(credit + _REOPENED_PER_S * (now_s - filled_s), idle + half_sent), now_s
        for _ in range(min(_OPENED_AT_ONCE, len(missing), int(credit))):
            credit -= 1
            half = missing.pop()
            connection = socket.socket(socket.AF_INET6 if ":" in port.host else socket.AF_INET)
            connection.settimeout(0.2)
            try:
                connection.connect((_reachable(port.host), port.number))
                if half:
                    connection.send(_HALF)
            except OSError:
                connection.close()
                missing.append(half)
                break
            connection.setblocking(False)
            is_half[connection] = half
            selector.register(connection, selectors.EVENT_READ)
        for key, _ in selector.select(0.02):
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            try:
                ended = not peer.recv(65536)
            except OSError:
                ended = True
            if ended:
                selector.unregister(peer)
                peer.close()
                missing.append(is_half.pop(peer))
        if now_s >= told_s + 1.0:
            told_s = now_s
            kept_to.send(len(is_half))


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


@contextmanager
def besieged(ports: list[Port], idle: int, half_sent: int) -> Iterator[dict[Port, Connection]]:
    """Besiege all ports until the block ends; by port, what tells how many connections are open."""
    told: dict[Port, Connection] = {}
    processes = []
    for port in ports:
        mine, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_besiege, args=(port, idle, half_sent, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        told[port] = mine
    try:
        yield told
    finally:
        for process in processes:
            process.kill()
            process.join()


def last_told(connection: Connection) -> int:
    """Return the newest number of open connections."""
    number = 0
    while connection.poll():
        number = connection.recv()
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--half-sent", type=int, default=2200)
    parser.add_argument("--descriptors", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    hard = max(resource.getrlimit(resource.RLIMIT_NOFILE)[1], args.idle + args.half_sent + 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as made:
        job = Job(Path(made), descriptors=args.descriptors)
        try:
            while job.steps() < 5:
                assert job.process.poll() is None, (job.folder / "run.out").read_text()
                time.sleep(0.5)
            print(f"before: {job.measure(10)}", flush=True)
            ports, processes = job.ports(), job.processes()
            with besieged(ports, args.idle, args.half_sent) as told:
                print(f"besieged: {job.measure(args.seconds)}", flush=True)
                for port, connection in told.items():
                    print(f"  {port.host}:{port.number} ({port.holder}) keeps {last_told(connection):,} connections")
            alive = job.processes()
            agents = sum(_what(process) == "agent" for process in alive)
            ended = len(set(processes) - set(alive))
            print(f"{ended} of {len(processes)} processes have ended, {agents} of 2 agents live")
            print(f"epochs begun in all: {job.epochs()}")
            if job.process.poll() is None:
                print(f"after: {job.measure(10)}", flush=True)
        finally:
            job.end()


if __name__ == "__main__":
    main()
