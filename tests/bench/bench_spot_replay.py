"""Replays a spot trace on an emulated mixed cluster of five nodes: goodput of elastic training, of a restart from the
last checkpoint after every loss, and of waiting until all nodes are back.

    python -m tests.bench.bench_spot_replay [--seed 10] [--seconds 300] [--figure spot_replay.svg]

EMULATED are the devices: a step takes what A100s and RTX 3090s would take, times ``--time-scale``, while a small model
computes on this machine. REAL are agents, ranks, kills, planning, starts, copies, checkpoints and recoveries, all of
them on this one machine, whose cores all nodes share; state is the small model's. The trace is generated from the
printed seed (:func:`tests.bench.bench_spot_trace.trace`) and is compressed, to minutes between losses where spot GPUs
have hours; what a loss costs is not, so that goodput is lower here than it would be for all three.

Policies, on the same trace for as many seconds, each from its first step on all nodes
  elastic   agents; a lost node's agent is killed, and its copies are deleted with it; a node that comes is started.
  restart   torchrun, killed by every loss, and started again at once on what is there, from ``--save``.
  wait      the same, but started again only when all nodes are there.

Counted are the steps of the history that survives, except for the first one after each start, which an emulation does
not slow down (docs/emulation.md). Goodput is relative to all nodes all the time.
"""

import argparse
import contextlib
import itertools
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
from matplotlib.figure import Figure

from hetero.checkpoint.folder import latest_step
from hetero.elastic.planning_problem import PlanningProblem, present_cluster
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.elastic import describe
from megatron.pretrain.emulation import CHECKPOINTS
from tests.bench.bench_spot_trace import Change, StepTimes, trace
from tests.helpers.commands import ROOT, command_line
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.etcd import EtcdServer

CLUSTER = """\
node_types:
  - {name: a100, device: A100-40, gpus_per_node: 1, count: 2}
  - {name: rtx3090, device: RTX-3090, gpus_per_node: 1, count: 3}
links: {between_nodes: {bandwidth_gb_per_s: 12, latency_us: 10}}
"""
TYPE_OF = {"a0": "a100", "a1": "a100", "r0": "rtx3090", "r1": "rtx3090", "r2": "rtx3090"}
FLAGS = command_line(
    num_layers="12",
    hidden_size="1024",
    num_attention_heads="16",
    seq_length="2048",
    max_position_embeddings="2048",
    tokenizer_type="ByteLevelTokenizer",
    vocab_size="50257",
    make_vocab_size_divisible_by=None,
    global_batch_size="32",
    train_iters="100000",
    lr="1e-3",
    distributed_backend=None,
    hetero_plan_time_limit="3",
)
COPY_EVERY = 2
POLL_S = 0.1
START_S = 300.0
"""For the first step on all nodes."""

_LOGGED = re.compile(r"^step +(\d+)/\d+ \| loss", re.MULTILINE)


@dataclass
class History:
    """Steps that survive, as somebody sees them who looks now and then.

    curve: seconds on the clock, and the steps that count.
    recoveries: seconds from each loss that ended training to the next step.
    """

    began_s: float = 0.0
    first_step: int = 0
    curve: list[tuple[float, int]] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    _unemulated: set[int] = field(default_factory=set)
    _step: int = 0
    _lost_s: float | None = None

    def begin(self, step: int) -> None:
        """The clock starts, after ``step``."""
        self.began_s, self.first_step, self._step = time.monotonic(), step, step
        self.curve.append((0.0, 0))

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def lost(self) -> None:
        """Training has ended just now."""
        if self._lost_s is None:
            self._lost_s = self.now_s

    def goes_on_after(self, step: int) -> None:
        """Ranks were started that go on after ``step``."""
        self._unemulated = {each for each in self._unemulated if each <= step} | {step + 1}
        self._step = step
        self._note()

    def saw(self, step: int) -> None:
        """This is the newest step."""
        if step <= self._step:
            return
        if self._lost_s is not None:
            self.recoveries.append(self.now_s - self._lost_s)
            self._lost_s = None
        self._step = step
        self._note()

    def _note(self) -> None:
        unemulated = sum(self.first_step < each <= self._step for each in self._unemulated)
        self.curve.append((self.now_s, max(0, self._step - self.first_step - unemulated)))


class Policy(Protocol):
    """Somebody who trains; the clock is in ``history``."""

    history: History

    def begin(self) -> None:
        """Start on all nodes, and the clock at the first step."""

    def change(self, before: frozenset[str], there: frozenset[str]) -> None:
        """Other nodes are there from now on."""

    def look(self) -> None:
        """Note what has been trained."""


class Elastic:
    """Agents."""

    def __init__(self, nodes: ElasticCluster) -> None:
        self.history = History()
        self._nodes = nodes
        self._epoch = 0

    def begin(self) -> None:
        self._nodes.start()
        self._nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == len(TYPE_OF), seconds=START_S)
        state = self._nodes.state()
        assert state.epoch is not None
        self._epoch = state.epoch.number
        state = self._nodes.wait_for_step(state.epoch.start.step + 2, seconds=START_S)
        self.history.begin(max(rank.step for report in state.reports.values() for rank in report.ranks))

    def change(self, before: frozenset[str], there: frozenset[str]) -> None:
        for name in before - there:
            epoch = self._nodes.state().epoch
            if epoch is not None and any(each.node.name == name for each in epoch.nodes):
                self.history.lost()
            self._nodes.kill_node(name)
            # A node that is taken away takes its memory along.
            shutil.rmtree(self._nodes.folder_of_copies(name), ignore_errors=True)
        for name in there - before:
            self._nodes.start(name)

    def look(self) -> None:
        state = self._nodes.state()
        assert state.outcome is None, f"the job has ended: {state.outcome}\n{self._nodes.told()}"
        if state.epoch is None:
            return
        if state.epoch.number != self._epoch:
            self._epoch = state.epoch.number
            self.history.goes_on_after(state.epoch.start.step)
        ranks = [r for report in state.reports.values() for r in report.ranks if r.epoch == self._epoch]
        self.history.saw(max((rank.step for rank in ranks if rank.phase != "restored"), default=0))


class Torchrun:
    """A job that ends with every loss, and goes on from its last checkpoint.

    Args:
        waits: for all nodes, before it starts again.
    """

    def __init__(self, folder: Path, flags: Sequence[str], cluster: ClusterSpec, *, every: int, waits: bool) -> None:
        self.history = History()
        self._folder, self._flags, self._cluster = folder, flags, cluster
        self._every, self._waits = every, waits
        self._process: subprocess.Popen[bytes] | None = None
        self._used: frozenset[str] = frozenset()
        self._starts = 0

    def begin(self) -> None:
        self._start(frozenset(TYPE_OF))
        deadline = time.monotonic() + START_S
        while (step := self._newest()) < 2:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(POLL_S)
        self.history.begin(step)

    def change(self, before: frozenset[str], there: frozenset[str]) -> None:
        if self._used and not self._used <= there:
            self.end()
            self.history.lost()
            self.history.goes_on_after(self._saved or 0)
        if not self._used and (there == frozenset(TYPE_OF) or (there and not self._waits)):
            self._start(there)

    def look(self) -> None:
        if self._process is not None:
            assert self._process.poll() is None, self._log.read_text()
            self.history.saw(self._newest())

    def end(self) -> None:
        """Kill all processes."""
        if self._process is None:
            return
        mine = psutil.Process(self._process.pid)
        for process in (mine, *mine.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process, self._used = None, frozenset()

    @property
    def _saved(self) -> int | None:
        return latest_step(self._folder / "saved" / CHECKPOINTS)

    @property
    def _log(self) -> Path:
        return self._folder / f"start_{self._starts}.log"

    def _newest(self) -> int:
        return max(map(int, _LOGGED.findall(self._log.read_text())), default=0)

    def _start(self, there: frozenset[str]) -> None:
        self._starts += 1
        self._used = there
        path = self._folder / f"cluster_{self._starts}.json"
        save(present_cluster(self._cluster, Counter(TYPE_OF[name] for name in there)), path)
        saved = str(self._folder / "saved")
        flags = [*self._flags, "--hetero-emulate", str(path), "--save", saved, "--save-interval", str(self._every)]
        if self._saved is not None:
            flags += ["--load", saved]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(there))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launcher, "pretrain_gpt.py", *flags], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )


def replay(policy: Policy, changes: Sequence[Change], end_s: float) -> History:
    """Let the trace happen to a policy."""
    policy.begin()
    left = list(changes[1:])
    there = changes[0].nodes
    while policy.history.now_s < end_s:
        if left and left[0].at_s <= policy.history.now_s:
            change = left.pop(0)
            policy.change(there, change.nodes)
            there = change.nodes
        policy.look()
        time.sleep(POLL_S)
    policy.history.curve.append((end_s, policy.history.curve[-1][1]))
    return policy.history


@contextlib.contextmanager
def made(name: str, args: argparse.Namespace, folder: Path, flags: Sequence[str]) -> Iterator[Policy]:
    """A policy with what it needs, of which nothing is left afterwards."""
    folder.mkdir()
    if name == "elastic":
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        options = {"min-nodes": 1, "dwell": args.dwell, "upload-every": args.checkpoint_every}
        options["object-store"] = f"file://{folder}/store"
        (folder / "store").mkdir()
        words = ["pretrain_gpt.py", *flags, "--hetero-emulate", str(folder.parent / "cluster.yaml")]
        words += ["--hetero-elastic-copy-every", str(COPY_EVERY)]
        try:
            with ElasticCluster(folder, etcd, "spot", types=TYPE_OF, words=words, options=options) as nodes:
                yield Elastic(nodes)
        finally:
            etcd.stop()
        return
    cluster = load(ClusterSpec, folder.parent / "cluster.yaml")
    policy = Torchrun(folder, flags, cluster, every=args.checkpoint_every, waits=name.startswith("wait"))
    try:
        yield policy
    finally:
        policy.end()


def draw(path: Path, changes: Sequence[Change], found: dict[str, History], end_s: float, title: str) -> None:
    """Nodes that are there, and the steps that survive, over time."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    upper.set_title(title, fontsize=9)
    edges = [change.at_s for change in changes] + [end_s]
    upper.stairs([len(change.nodes) for change in changes], edges, fill=True, color="#b7c0cc")
    upper.set_ylabel("nodes there")
    for (name, history), colour in zip(found.items(), ("#2c8a6d", "#c96f12", "#4b83bd"), strict=True):
        at_s, steps = zip(*history.curve, strict=True)
        lower.step(at_s, steps, where="post", label=name, color=colour)
    lower.set_xlabel("seconds on the wall")
    lower.set_ylabel("steps done that survive")
    lower.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each policy, from its first step on all nodes")
    parser.add_argument("--up", type=float, default=240.0, help="mean seconds that a node is there")
    parser.add_argument("--away", type=float, default=60.0, help="mean seconds until it comes back")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--dwell", type=float, default=5.0, help="seconds, of the agents")
    parser.add_argument("--time-scale", type=float, default=3.0, help="wall seconds per emulated second")
    parser.add_argument("--policies", nargs="+", choices=["elastic", "restart", "wait"])
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    changes = trace(list(TYPE_OF), seed=args.seed, end_s=args.seconds, up_s=args.up, away_s=args.away)
    least = min(len(change.nodes) for change in changes)
    assert least >= 2, f"seed {args.seed} leaves {least} nodes: take another one"
    losses = sum(len(b.nodes) < len(a.nodes) for a, b in itertools.pairwise(changes))
    with tempfile.TemporaryDirectory(prefix="hetero-spot-") as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(CLUSTER)
        flags = [*FLAGS, "--hetero-emulate-time-scale", str(args.time_scale)]
        emulated = [*flags, "--hetero-emulate", str(folder / "cluster.yaml")]
        describe(parse_args(emulated), folder / "problem.json")
        times = StepTimes(load(PlanningProblem, folder / "problem.json"), TYPE_OF, limit_s=3.0)
        predicted_s = times.of(changes[0].nodes)
        assert predicted_s is not None
        whole_s = predicted_s * args.time_scale
        said = (
            f"seed {args.seed}: 2 A100, 3 RTX 3090, {args.seconds:g} s, {losses} losses, at least {least} nodes, "
            f"a step on all takes {whole_s:.2f} s"
        )
        print(f"{platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {said}", flush=True)
        print("| policy | steps | goodput | s from a loss to the next step: median (least to most) | load |")
        print("|---|--:|--:|--:|--:|", flush=True)
        found = {}
        for policy_name in args.policies or ("elastic", "restart", "wait"):
            with made(policy_name, args, folder / policy_name, flags) as policy:
                history = found[policy_name] = replay(policy, changes, args.seconds)
            took = history.recoveries
            recovery = f"{statistics.median(took):.1f} ({min(took):.1f} to {max(took):.1f})" if took else "none"
            steps = history.curve[-1][1]
            goodput = steps * whole_s / args.seconds
            print(f"| {policy_name} | {steps} | {goodput:.0%} | {recovery} | {os.getloadavg()[0]:.1f} |", flush=True)
        if args.figure is not None:
            title = f"step times EMULATED, starts and recoveries REAL on one machine of {os.cpu_count()} cores\n{said}"
            draw(args.figure, changes, found, args.seconds, title)


if __name__ == "__main__":
    main()
