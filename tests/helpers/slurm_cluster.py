"""A Slurm of the tests' own: slurmctld, some slurmd that each stand for a node, and munged, all on this machine.

Slurm's daemons want to be root's. Ports are free ones, files lie in one folder.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.ports import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
NEEDS_SLURM = "needs Slurm as root: apt-get install slurm-wlm munge"


def can_run_slurm() -> bool:
    """Whether its daemons are here and may be started."""
    return os.geteuid() == 0 and all(map(shutil.which, DAEMONS))


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes ``NAME0``, ``NAME1``, ... with so many GPUs each, of Slurm's type ``name``, which nobody computes with.

    They are in a partition of this name, and in ``all``.
    """

    name: str = "node"
    count: int
    num_gpus: int = 0

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}{i}" for i in range(self.count)]


class SlurmCluster:
    """Nodes of some kinds. Runs until :meth:`stop`."""

    def __init__(self, folder: Path, *kinds: NodeKind) -> None:
        self._folder = folder
        self._kinds = kinds
        self._nodes = [node for kind in kinds for node in kind.nodes]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle.

        Raises:
            RuntimeError: they are not after a while, with what the daemons have said.
        """
        self._write_configuration()
        munge = {name: str(self._folder / f"munge.{name}") for name in ("key", "socket", "pid", "log", "seed")}
        Path(munge["key"]).write_bytes(os.urandom(128))
        Path(munge["key"]).chmod(0o400)
        files = (f"--{'key-file' if n == 'key' else n if n == 'socket' else f'{n}-file'}={p}" for n, p in munge.items())
        self._start("munged", ["munged", "--force", "--foreground", *files])
        _until(Path(munge["socket"]).exists, "munged has no socket", self._logs)
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in self._nodes:
            (self._folder / "spool" / node).mkdir(parents=True)
            self._start(node, ["slurmd", "-D", "-N", node])
        idle = ["idle"] * len(self._nodes)
        _until(
            lambda: self.call("sinfo", "-h", "-N", "-p", "all", "-o", "%T", check=False).split() == idle,
            "no node",
            self._logs,
        )

    def stop(self) -> None:
        """End all jobs and daemons."""
        try:
            if len(self._processes) > 1:
                self.call("scancel", "--signal=KILL", "--full", "--user=root", check=False)
                self.call("scancel", "--user=root", check=False)
                _until(lambda: not self.call("squeue", "--noheader", check=False), "jobs are left", self._logs)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def call(self, *words: str, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def submit(self, script: Path, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> int:
        """Submit a batch script with more variables in its environment; the number of the job."""
        environment = {**self.environment, **variables}
        words = ["sbatch", "--parsable", *options, str(script), *arguments]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return int(done.stdout)

    def requeue(self, task: str) -> None:
        """Start a task of an array again that is over, or waits: without the usual pause of two minutes."""
        if task not in self.call("squeue", "--noheader", "--array", "--format=%i"):
            self.call("scontrol", "requeue", task)
        self.call("scontrol", "update", f"JobId={task}", "StartTime=now")

    def states(self, job: int) -> dict[str, str]:
        """By task of an array, the state of those that are not over."""
        lines = self.call("squeue", "--noheader", "--array", "--format=%i %T", f"--jobs={job}", check=False)
        return dict(line.split() for line in lines.splitlines())

    def wait_for_end(self, job: int) -> None:
        """Until a job and all its components are over, however they ended; tests have a time limit."""
        while self.call("squeue", "--noheader", f"--jobs={job}", check=False).strip():
            time.sleep(0.5)

    def _start(self, name: str, words: list[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._processes.append(subprocess.Popen(words, env=self.environment, stdout=out, stderr=out))

    def _logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in sorted(self._folder.glob("*.out")))

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(self._nodes))
        files = {"PidFile": "pid", "LogFile": "log"}
        lines = [
            "ClusterName=tests",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={port}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self._folder}/munge.socket",
            f"StateSaveLocation={self._folder}/state",
            f"SlurmdSpoolDir={self._folder}/spool/%n",
            *(f"Slurmctld{key}={self._folder}/slurmctld.{name}" for key, name in files.items()),
            *(f"Slurmd{key}={self._folder}/%n.{name}" for key, name in files.items()),
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            # A node is a job's as a whole where that asks for it; GPUs are counted.
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "GresTypes=gpu",
            # The one that starts heterogeneous jobs.
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
            "MpiDefault=none",
            "ReturnToService=2",
            "KillWait=30",
            "SlurmdParameters=config_overrides",
            *self._nodes_and_partitions(host, ports),
            f"PartitionName=all Nodes={','.join(self._nodes)} Default=YES MaxTime=INFINITE State=UP",
        ]
        # Which GPU is whose, the variable CUDA_VISIBLE_DEVICES says, by the numbers of files that are no GPUs.
        devices = [
            f"NodeName={{}} Name=gpu Type={kind.name} File=/dev/tty[0-{kind.num_gpus - 1}]" for kind in self._kinds
        ]
        lines_of_gpus = [
            line.format(",".join(kind.nodes)) for kind, line in zip(self._kinds, devices, strict=True) if kind.num_gpus
        ]
        (self._folder / "gres.conf").write_text("".join(f"{line}\n" for line in lines_of_gpus))
        (self._folder / "state").mkdir(parents=True)
        (self._folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _nodes_and_partitions(self, host: str, ports: Sequence[int]) -> list[str]:
        at, lines = iter(ports), []
        for kind in self._kinds:
            gpus = f" Gres=gpu:{kind.name}:{kind.num_gpus}" if kind.num_gpus else ""
            lines += [
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={next(at)} CPUs=1 RealMemory=100{gpus}"
                for node in kind.nodes
            ]
            lines.append(f"PartitionName={kind.name} Nodes={','.join(kind.nodes)} MaxTime=INFINITE State=UP")
        return lines


def _until(done: Callable[[], bool], problem: str, logs: Callable[[], str]) -> None:
    for _ in range(300):
        if done():
            return
        time.sleep(0.1)
    raise RuntimeError(f"{problem} after 30 s:\n{logs()}")
