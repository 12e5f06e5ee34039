"""A Slurm of the tests' own: its controller on a head, and nodes, all of them hosts in namespaces of this machine.

Hosts have names and addresses of their own, so that nothing works by accident because all is one machine. GPUs are
files that Slurm counts.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests.helpers.namespaced_hosts import HEAD, HEAD_ADDRESS, NamespacedHost, NamespacedHosts, why_no_hosts
from tests.helpers.terminals import Terminal, opened_terminal

NamesKnown = Literal["all", "own", "own on loopback"]
"""Which host names a node can resolve, in addition to the head's. Debian writes a host's own name at 127.0.1.1."""

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")

_SETTINGS = {
    "ClusterName": "tests",
    "SlurmctldHost": f"{HEAD}({HEAD_ADDRESS})",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",
    "GresTypes": "gpu",
    # The scheduler that starts heterogeneous jobs.
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "MpiDefault": "none",
    "ReturnToService": "2",
    "KillWait": "30",
    "SlurmdParameters": "config_overrides",
}


def why_no_slurm() -> str:
    """Return what is missing for a Slurm of the tests' own; empty if nothing is."""
    missing = [daemon for daemon in _DAEMONS if shutil.which(daemon) is None]
    if missing:
        return f"needs {', '.join(missing)} of Slurm: apt-get install slurm-wlm munge"
    return why_no_hosts()


needs_slurm = pytest.mark.skipif(bool(_WHY_NO_SLURM := why_no_slurm()), reason=_WHY_NO_SLURM)


@dataclass(frozen=True, kw_only=True)
class NodeKind:
    """Nodes ``NAME0``, ``NAME1``, ... in the partitions ``NAME``, ``all``, and ``urgent``, which preempts the others.

    num_gpus: of Slurm's type ``name``.
    gpus: by Slurm's type, how many; in the place of ``num_gpus``. The type "" is for sites without types.
    memory_mb: of which a job takes all on its nodes unless it asks for less.
    features: of which a job may ask for one (``--constraint``).
    """

    name: str = "node"
    count: int
    num_gpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 4
    memory_mb: int = 1000
    features: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[str]:
        return [f"{self.name}{i}" for i in range(self.count)]

    @property
    def gpus_by_type(self) -> dict[str, int]:
        return dict(self.gpus) or ({self.name: self.num_gpus} if self.num_gpus else {})


class SlurmCluster:
    """Nodes of some kinds. Runs until :meth:`stop`, and no longer than the test process.

    Args:
        folder: for configuration, state and logs.
        host_name: of a node, in which ``{}`` is the name that it has in Slurm.
        names_known: which host names the nodes' ``/etc/hosts`` have.
        settings: lines of ``slurm.conf`` that are added, or replace those here.
    """

    def __init__(
        self,
        folder: Path,
        *kinds: NodeKind,
        host_name: str = "{}",
        names_known: NamesKnown = "all",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._kinds = kinds
        self._names_known = names_known
        self._settings = {**_SETTINGS, **(settings or {})}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.nodes = [node for kind in kinds for node in kind.nodes]
        self.hosts = NamespacedHosts(folder, {node: host_name.format(node) for node in self.nodes}, self._hosts_file)
        # Other tests of this process may have set what holds for ranks on one host (tests/helpers/rank_pool.py).
        foreign = ("SLURM_", "SBATCH_", "SRUN_", "MASTER_", "GLOO_", "NCCL_")
        outside = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**outside, "SLURM_CONF": str(folder / "slurm.conf")}

    @property
    def head(self) -> NamespacedHost:
        """The host of the controller, on which :meth:`call` and :meth:`submit` run."""
        return self.hosts.head

    def start(self) -> None:
        """Start all hosts and daemons, and wait until all nodes are idle.

        Raises:
            RuntimeError: they are not after a while, with what the daemons have said.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "SlurmCluster":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all hosts, and all daemons, jobs and other processes that run on them."""
        self.hosts.stop()
        for daemon in self._daemons:
            daemon.wait()

    def call(
        self,
        *words: str,
        check: bool = True,
        folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Return what a command prints that runs on the head, with more variables in its environment."""
        done = subprocess.run(
            self.head.command(words, folder=folder),
            env={**self.environment, **(variables or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def submit(self, script: Path, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> int:
        """Submit a batch script with more variables in its environment; return the number of the job."""
        return int(self.call("sbatch", "--parsable", *options, str(script), *arguments, variables=variables))

    def terminal(self, *words: str, folder: Path, **variables: str) -> AbstractContextManager[Terminal]:
        """Run a command on the head as a user does who sits at a terminal; it is hung up at the end."""
        return opened_terminal(self.head, words, folder=folder, environment={**self.environment, **variables})

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
        """Wait until a job and all its components are over, however they ended; tests have a time limit."""
        while self.call("squeue", "--noheader", f"--jobs={job}", check=False).strip():
            time.sleep(0.5)

    def cut(self, node: str) -> None:
        """Pull a node's cable; :meth:`heal` undoes it. Slurm notices after its SlurmdTimeout."""
        self.hosts.cut(node)

    def heal(self, node: str) -> None:
        self.hosts.heal(node)

    def take_down(self, node: str) -> None:
        """Have Slurm take a node for lost."""
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def resume(self, node: str) -> None:
        """Give a node back, unless its daemon has said already that it is there."""
        self.call("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def _start(self) -> None:
        self._write_configuration()
        self.hosts.start()
        munge = {name: str(self._folder / f"munge.{name}") for name in ("key", "socket", "pid", "log", "seed")}
        Path(munge["key"]).write_bytes(os.urandom(128))
        Path(munge["key"]).chmod(0o400)
        files = (f"--{'key-file' if n == 'key' else n if n == 'socket' else f'{n}-file'}={p}" for n, p in munge.items())
        self._start_daemon("munged", self.head, ["munged", "--force", "--foreground", *files])
        self._wait_until(Path(munge["socket"]).exists)
        self._start_daemon("slurmctld", self.head, ["slurmctld", "-D"])
        for node in self.nodes:
            (self._folder / "spool" / node).mkdir(parents=True)
            self._start_daemon(node, self.hosts[node], ["slurmd", "-D", "-N", node])
        idle = ["idle"] * len(self.nodes)
        self._wait_until(lambda: self.call("sinfo", "-h", "-N", "-p", "all", "-o", "%T", check=False).split() == idle)

    def _start_daemon(self, name: str, host: NamespacedHost, words: list[str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    host.command(words), env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            )

    def _wait_until(self, has_started: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not has_started():
            has_died = any(daemon.poll() is not None for daemon in self._daemons)
            if has_died or time.monotonic() > deadline:
                outputs = sorted(self._folder.glob("*.out")) + sorted(self._folder.glob("*.log"))
                raise RuntimeError("\n".join(f"{path.name}: {path.read_text()[-1000:]}" for path in outputs))
            time.sleep(0.05)

    def _hosts_file(self, node: str, addresses: Mapping[str, str]) -> str:
        own = self.hosts.host_names[node]
        known = dict(addresses)
        if node != HEAD and self._names_known != "all":
            known = {HEAD: HEAD_ADDRESS, own: addresses[own] if self._names_known == "own" else "127.0.1.1"}
        return "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **known}.items())

    def _write_configuration(self) -> None:
        all_nodes = ",".join(self.nodes)
        files = {"PidFile": "pid", "LogFile": "log"}
        lines = [
            *(f"{key}={value}" for key, value in self._settings.items()),
            f"AuthInfo=socket={self._folder}/munge.socket",
            f"StateSaveLocation={self._folder}/state",
            f"SlurmdSpoolDir={self._folder}/spool/%n",
            *(f"Slurmctld{key}={self._folder}/slurmctld.{name}" for key, name in files.items()),
            *(f"Slurmd{key}={self._folder}/%n.{name}" for key, name in files.items()),
            *(line for kind in self._kinds for line in self._lines_of(kind)),
            f"PartitionName=all Nodes={all_nodes} Default=YES MaxTime=INFINITE State=UP",
            f"PartitionName=urgent Nodes={all_nodes} PriorityTier=10 MaxTime=INFINITE State=UP",
        ]
        (self._folder / "gres.conf").write_text("".join(f"{line}\n" for kind in self._kinds for line in _gpus_of(kind)))
        (self._folder / "state").mkdir(parents=True)
        (self._folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _lines_of(self, kind: NodeKind) -> Iterator[str]:
        gpus = ",".join(f"gpu:{name}:{count}" if name else f"gpu:{count}" for name, count in kind.gpus_by_type.items())
        more = (f" Gres={gpus}" if gpus else "") + (f" Feature={','.join(kind.features)}" if kind.features else "")
        for node in kind.nodes:
            host = f"NodeHostname={self.hosts.host_names[node]} NodeAddr={self.hosts.addresses[node]}"
            yield f"NodeName={node} {host} CPUs={kind.cpus} RealMemory={kind.memory_mb}{more}"
        yield f"PartitionName={kind.name} Nodes={','.join(kind.nodes)} MaxTime=INFINITE State=UP"


def _gpus_of(kind: NodeKind) -> Iterator[str]:
    """Which GPU is whose, the variable CUDA_VISIBLE_DEVICES says, by the numbers of files that are no GPUs."""
    first = 0
    for name, count in kind.gpus_by_type.items():
        of_type = f" Type={name}" if name else ""
        yield f"NodeName={','.join(kind.nodes)} Name=gpu{of_type} File=/dev/tty[{first}-{first + count - 1}]"
        first += count
