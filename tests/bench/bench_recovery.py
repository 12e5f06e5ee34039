"""Measures how long ranks take to load their state after one of four nodes was lost: from peers, and from the cloud.

Nodes and an object store (SeaweedFS) are network namespaces of this machine, the store's link is capped by ``tc tbf``,
and what the cap really is is measured beside every run. 1 GiB of weights and moments, two pipelines of two stages.

    python -m tests.bench.bench_recovery [--caps 100 400 0] [--repeats 3] [--peers VENV/bin/python]
        [--optimizers whole shared]

Two cases:

new plan    three nodes are left: a pipeline of two stages, and one of one stage. Three ranks load 0.5, 0.5 and 1 GiB,
            with a distributed optimizer less.
same plan   an empty node has taken the lost one's place, and each rank holds 0.5 GiB. This is torchft's case: it knows
            no other plan, no object store, and no optimizer that is distributed over replicas. The ranks of the broken
            replica receive what those of the whole one send, which live on; ours are all new, and all load (one row
            lets only those two load). Nobody reads from the store. What comes is not checked by torchft.

Readers take turns, so that what else the machine does hits all alike. Peers run in an environment of their own, which
the bench does not make:

    python -m venv VENV && VENV/bin/pip install --editable '.[train,elastic]' s3torchconnector tenacity s3fs \\
        torchft-nightly opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http

All readers have imported what they need, and allocated where it goes, and those of torchft have connected, before the
clock starts. It stops when the last rank has its state; all values are then compared.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero.elastic.certificate_authority import make_certificates
from hetero.elastic.copy_folder import copy_path, slot_folder
from hetero.elastic.copy_tls import tls_of_etcd
from hetero.elastic.records import CopyPlacement, Epoch, EpochNode, NodeInfo, RankAssignment, RestorePoint
from hetero.plan.ir import Plan
from hetero.serialization import save
from tests.bench import recovery_state as state
from tests.bench.recovery_worker import ADDRESS, JOB, PORT, TLS_PORT, TOKEN
from tests.helpers.network_namespaces import Host, Switch, switched_hosts
from tests.helpers.s3_server import S3Server
from tests.helpers.sources import ROOT

BUCKET = "s3://bench"


@dataclass(frozen=True, slots=True)
class Reader:
    """One way to load. ``kind`` is what a worker knows it by; ``ranks`` load, the others have what they need."""

    title: str
    kind: str
    ranks: tuple[int, ...]

    @property
    def is_ours(self) -> bool:
        return self.kind.startswith("ours")


NEW_PLAN = tuple(
    Reader(title, kind, (0, 1, 2))
    for title, kind in (
        ("peers' memory (ours)", "ours"),
        ("peers' memory (ours), by TLS", "ours-tls"),
        ("object store (ours, whole reload)", "ours-store"),
        ("torch DCP, s3torchconnector", "dcp-s3torchconnector"),
        ("torch DCP, s3fs", "dcp-s3fs"),
    )
)
SAME_PLAN = (
    Reader("peers' memory (ours), all ranks", "ours", (0, 1, 2, 3)),
    Reader("peers' memory (ours), the broken replica alone", "ours", (2, 3)),
    Reader("peer replica (torchft, HTTPTransport)", "torchft-http", (2, 3)),
    Reader("peer replica (torchft, PGTransport, gloo, in place)", "torchft-pg", (2, 3)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be loaded, a host for each rank of the plan, and who loads."""

    title: str
    plan: Plan
    hosts: tuple[Host, ...]
    readers: tuple[Reader, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One load of all ranks: from the start of the first to the end of the last.

    cap_mib_per_s: as measured; ``None`` where nobody reads from the store.
    """

    seconds: float
    num_bytes: int
    cap_mib_per_s: float | None


class Bench:
    """Hosts, folders and servers of one state."""

    def __init__(self, args: argparse.Namespace, switch: Switch, folder: Path, *, sharded: bool) -> None:
        self._args = args
        self._switch = switch
        self._folder = folder
        self._nodes, self._spare, self._store_host = switch.hosts[:4], switch.hosts[4], switch.hosts[5]
        self._before = state.before(args.layers, sharded=sharded)
        after = state.after(args.layers, sharded=sharded)
        left = self._nodes[:3]
        self.new_plan = Case("new", after, left, self._that_run(NEW_PLAN))
        self.same_plan = Case("same", self._before, (*left, self._spare), self._that_run(SAME_PLAN))
        self._server = S3Server(folder / "s3", host=self._store_host.address)
        self._shm = folder
        self._environment = {
            **os.environ,
            **self._server.environment,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # Peers warn of themselves on every run.
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._certificates = make_certificates(folder / "certificates", host="127.0.0.1")
        self._stack = ExitStack()
        self._placement: CopyPlacement | None = None

    def prepare(self, shm: Path) -> None:
        """Write copies, start servers, and fill the store."""
        folders = [shm / f"node{i}" for i in range(4)]
        self._placement, written = state.write_copies(self._before, folders)
        for host, folder in zip(self._nodes, folders, strict=True):
            self._serve(host, folder)
        self._server.start(prefix=tuple(self._store_host.command([])))
        self._stack.callback(self._server.stop)
        wait = f"import urllib.request as u,time\nwhile 1:\n try: u.urlopen('{self._server.endpoint}/status')\n"
        wait += " except u.HTTPError: break\n except OSError: time.sleep(.1)\n else: break\n"
        subprocess.run(self._nodes[0].command([sys.executable, "-c", wait]), check=True, timeout=60)
        slots = {rank: slot_folder(folder, state.EPOCH, 0) for rank, folder in enumerate(folders)}
        files = [str(copy_path(slots[int(unit[5:10])], unit)) for unit in written]
        self._run(self._nodes[0], sys.executable, "upload", f"{BUCKET}/ours", *files)
        for kind in (each.kind for each in self.new_plan.readers if each.kind.startswith("dcp")):
            words = ["dcp_save", kind, f"{BUCKET}/{kind}", str(self._args.layers)]
            self._run(self._nodes[0], self._args.peers, *words)
        self._lose(folders[3])

    def close(self) -> None:
        self._stack.close()

    def measure(self, case: Case, reader: Reader, cap: float | None) -> Measured:
        """Load once with the store's link capped."""
        self._switch.cap(self._store_host, mib_per_s=cap)
        reads_store = case is self.new_plan
        seen = float(self._run(self._nodes[0], sys.executable, "probe", f"{BUCKET}/ours")) if reads_store else None
        with tempfile.TemporaryDirectory(dir=self._folder) as name, ExitStack() as senders:
            barrier = Path(name)
            plan = barrier / "plan.json"
            save(case.plan, plan)
            python = sys.executable if reader.is_ours else self._args.peers
            kind = "ours" if reader.is_ours else reader.kind
            workers = []
            for rank in reader.ranks:
                if reader.is_ours:
                    source = str(barrier / f"assignment{rank}.json")
                    save(self._assignment(case, rank, kind=reader.kind), Path(source))
                elif reader.kind.startswith("torchft"):
                    # The same rank of the whole replica.
                    source = self._sends(reader, plan, rank - 2, senders)
                else:
                    source = f"{BUCKET}/{reader.kind}"
                words = ["measured", kind, str(plan), str(rank), source, name]
                workers.append(self._start(case.hosts[rank], python, words))
            while sum(1 for path in barrier.iterdir() if path.name.startswith("ready")) < len(workers):
                assert all(each.poll() is None for each in workers), "a reader has failed before it began"
                time.sleep(0.05)
            time.sleep(0.5)
            (barrier / "go").touch()
            outputs = [each.communicate(timeout=600)[0] for each in workers]
            assert all(each.returncode == 0 for each in workers), "a reader has failed"
        times = [[float(word) for word in output.split()] for output in outputs]
        seconds = max(end for _, end, _ in times) - min(start for start, _, _ in times)
        return Measured(seconds, int(sum(total for *_, total in times)), seen)

    def _that_run(self, readers: Sequence[Reader]) -> tuple[Reader, ...]:
        return tuple(each for each in readers if each.is_ours or self._args.peers)

    def _assignment(self, case: Case, rank: int, *, kind: str) -> RankAssignment:
        assert self._placement is not None
        from_store, by_tls = kind == "ours-store", kind == "ours-tls"
        tls = tls_of_etcd(self._certificates.address("https://127.0.0.1:1")) if by_tls else None
        # The spare is node 4; the lost one was node 3.
        names = [f"node{(0, 1, 2, 4)[i]}" for i in range(len(case.hosts))]
        nodes = tuple(
            EpochNode(
                node=NodeInfo(
                    name=name,
                    incarnation="1",
                    node_type="cpu",
                    num_ranks=1,
                    host=host.address,
                    port=(TLS_PORT if by_tls else PORT) + i,
                    failure_domain=name,
                    settings="",
                ),
                ranks=(i,),
            )
            for i, (name, host) in enumerate(zip(names, case.hosts, strict=True))
        )
        sources = {
            unit.name: ()
            if from_store
            else tuple(f"node{r}" for r in (unit.owner, unit.keeper) if r is not None and r < 3)
            for unit in self._placement.units
        }
        start = RestorePoint(epoch=state.EPOCH, step=state.STEP)
        epoch = Epoch(
            number=2,
            plan=case.plan,
            nodes=nodes,
            start=start,
            ids={1: "id1", 2: "id2"},
            lineage={1: RestorePoint(epoch=0, step=0), 2: start},
            sources=sources,
            rendezvous_host="",
            rendezvous_port=0,
            reason="bench",
        )
        folder = self._shm / names[rank]
        folder.mkdir(exist_ok=True)
        url = f"{BUCKET}/ours" if from_store else None
        return RankAssignment(
            job=JOB,
            epoch=epoch,
            node=names[rank],
            token=TOKEN,
            folder=str(folder),
            reports="",
            object_store=url,
            trust=None if tls is None else tls.trust,
        )

    def _sends(self, reader: Reader, plan: Path, rank: int, stack: ExitStack) -> str:
        """Start the rank of the whole replica that sends what another one lacks; returns where it does."""
        host = self._nodes[rank]
        process = self._start(host, self._args.peers, ["torchft_send", reader.kind, str(plan), str(rank)])
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def _serve(self, host: Host, folder: Path) -> None:
        self._shm = folder.parent
        port = PORT + int(folder.name.removeprefix("node"))
        certificates = str(self._certificates.path)
        for words in ([str(port)], [str(port + TLS_PORT - PORT), certificates]):
            process = self._start(host, sys.executable, ["serve", str(folder), host.address, *words])
            self._stack.callback(process.wait)
            self._stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def _lose(self, folder: Path) -> None:
        self._switch.cut(self._nodes[3])
        shutil.rmtree(folder)

    def _start(self, host: Host, python: str, words: Sequence[str]) -> "subprocess.Popen[str]":
        command = host.command([python, "-m", "tests.bench.recovery_worker", *words])
        environment = {**self._environment, ADDRESS: host.address}
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def _run(self, host: Host, python: str, *words: str) -> str:
        process = self._start(host, python, words)
        output = process.communicate(timeout=900)[0]
        assert process.returncode == 0, words
        return output


@contextmanager
def prepared(args: argparse.Namespace, *, sharded: bool) -> Iterator[Bench]:
    """Everything in place, and nothing of it left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="hetero-bench-", dir="/dev/shm") as shm,
        tempfile.TemporaryDirectory(prefix="hetero-bench-") as folder,
        switched_hosts(6) as switch,
    ):
        bench = Bench(args, switch, Path(folder), sharded=sharded)
        try:
            bench.prepare(Path(shm))
            yield bench
        finally:
            bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", type=float, nargs="+", default=[100, 400, 0], metavar="MIB_PER_S", help="0: none")
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment with the other readers")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each reader")
    parser.add_argument("--optimizers", nargs="+", choices=["whole", "shared"], default=["whole", "shared"])
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}", flush=True)
    print(
        "| optimizer | plan | store capped at: measured, MiB/s | reader | ranks | GiB "
        "| seconds: median (least to most) | times ours |"
    )
    print("|---|---|---|---|--:|--:|--:|--:|")
    for optimizer in args.optimizers:
        with prepared(args, sharded=optimizer == "shared") as bench:
            if optimizer == "whole" and args.peers:
                report(optimizer, bench, bench.same_plan, cap=None, repeats=args.repeats)
            for cap in args.caps:
                report(optimizer, bench, bench.new_plan, cap=cap, repeats=args.repeats)


def report(optimizer: str, bench: Bench, case: Case, *, cap: float | None, repeats: int) -> None:
    """Measure all readers of a case in turns, and print a row for each."""
    runs: list[list[Measured]] = [[] for _ in case.readers]
    for _ in range(repeats):
        for loads, reader in zip(runs, case.readers, strict=True):
            loads.append(bench.measure(case, reader, cap or None))
    medians = [statistics.median(each.seconds for each in loads) for loads in runs]
    for reader, loads, median_s in zip(case.readers, runs, medians, strict=True):
        seen = ", ".join(f"{each.cap_mib_per_s:.0f}" for each in loads if each.cap_mib_per_s is not None)
        store = f"{cap or 'none'}: {seen}" if seen else "not read"
        times = [each.seconds for each in loads]
        print(
            f"| {optimizer} | {case.title} | {store} | {reader.title} | {len(reader.ranks)} | "
            f"{loads[0].num_bytes / 2**30:.2f} | {median_s:.2f} ({min(times):.2f} to {max(times):.2f}) | "
            f"{median_s / medians[0]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
