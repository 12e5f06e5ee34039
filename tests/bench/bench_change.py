"""Measures how long a loss takes, from the kill to the end of the next step: real agents and ranks on this machine.

    python -m tests.bench.bench_change [--nodes 3] [--turns 5]
    python -m tests.bench.bench_change --against FOLDER [--rounds 3]   # another checkout, in rounds with this one
    python -m tests.bench.bench_change --compare-tls [--rounds 3]      # plain HTTP and TLS, in rounds

In turns a rank is killed, and a node with all that runs on it; that comes back, and joins, before the next turn. The
model is tiny, so that what is measured are processes, groups and the protocol: bench_recovery has what state takes.
Needs two free cores: after a loss each rank of this machine computes where a host of its own would.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hetero.elastic.run_history import read_history
from hetero.report.elastic_run import PHASES
from tests.helpers.certificates import make_certificates
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import elastic_words
from tests.helpers.etcd import EtcdServer
from tests.helpers.sources import ROOT

STEPS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout to compare with")
    parser.add_argument("--tls", action="store_true", help="etcd and copies by TLS")
    parser.add_argument("--compare-tls", action="store_true", help="jobs with TLS and without, in rounds")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind in a comparison (default: 3)")
    args = parser.parse_args()
    if args.against is not None:
        compare({"this checkout": (ROOT, []), str(args.against): (args.against.resolve(), [])}, args)
        return
    if args.compare_tls:
        compare({"plain HTTP": (ROOT, []), "TLS": (ROOT, ["--tls"])}, args)
        return
    names = [f"node{i}" for i in range(args.nodes)]
    losses: dict[str, list[tuple[int, float]]] = {"rank": [], "node": []}
    with tempfile.TemporaryDirectory(prefix="bench-change-") as made:
        folder = Path(made)
        pair = (folder / "tls" / "etcd.pem", folder / "tls" / "etcd.key")
        if args.tls:
            make_certificates(folder / "tls", "etcd")
        etcd = EtcdServer(folder / "etcd", tls=pair if args.tls else None)
        etcd.start()
        try:
            words = elastic_words(folder, steps=STEPS)
            options = {"dwell": 0, "min-nodes": 1}
            types = dict.fromkeys(names, "box")
            with ElasticCluster(folder, etcd, "bench", types=types, words=words, options=options) as nodes:
                nodes.start()
                wait_for_all(nodes, args.nodes)
                for turn in range(args.turns):
                    losses["rank"].append(seconds_to_next_step(nodes, lambda: nodes.kill_rank(0)))
                    wait_for_all(nodes, args.nodes)
                    lost = names[turn % args.nodes]
                    losses["node"].append(seconds_to_next_step(nodes, lambda lost=lost: nodes.kill_node(lost)))  # type: ignore[misc]
                    nodes.start(lost)
                    wait_for_all(nodes, args.nodes)
                changes = {each.epoch: each for each in read_history(folder, name="bench", origin="").changes}
        finally:
            etcd.stop()
    print("| killed | seconds to the next step: median | all | " + " | ".join(PHASES) + " |")
    print("|---|--:|---|" + "--:|" * len(PHASES))
    for what, found in losses.items():
        seconds = [took for _, took in found]
        phases = [
            statistics.median(changes[epoch].phases.get(phase, 0.0) for epoch, _ in found if epoch in changes)
            for phase in PHASES
        ]
        print(
            f"| {what} | {statistics.median(seconds):.1f} | {', '.join(f'{each:.1f}' for each in seconds)} | "
            + " | ".join(f"{each:.2f}" for each in phases)
            + " |"
        )


def compare(kinds: Mapping[str, tuple[Path, list[str]]], args: argparse.Namespace) -> None:
    """Run this bench by turns in each checkout with its flags, so that other work hits all alike; print a table."""
    words = [sys.executable, "-m", "tests.bench.bench_change", f"--nodes={args.nodes}", f"--turns={args.turns}"]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.rounds):
        for name, (folder, flags) in kinds.items():
            environment = {**os.environ, "PYTHONPATH": str(folder)}
            said = subprocess.run(
                [*words, *flags], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            for killed, seconds in re.findall(r"^\| (rank|node) \| [\d.]+ \| ([\d., ]+) \|", said.stdout, re.MULTILINE):
                found.setdefault((killed, name), []).extend(map(float, seconds.split(",")))
    print("| killed | kind | seconds to the next step: median | least | most | of |")
    print("|---|---|--:|--:|--:|--:|")
    for (killed, name), seconds in sorted(found.items(), reverse=True):
        print(
            f"| {killed} | {name} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} | "
            f"{len(seconds)} |"
        )


def wait_for_all(nodes: ElasticCluster, count: int) -> None:
    """Wait until all nodes train, and their copies have been committed."""
    nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == count)
    state = nodes.state()
    assert state.epoch is not None
    nodes.wait_for_commit(state.epoch.start.step + 3, epoch=state.epoch.number)


def seconds_to_next_step(nodes: ElasticCluster, kill: Callable[[], None]) -> tuple[int, float]:
    """The epoch that follows, and when its last node has done a step."""
    before = nodes.state().epoch
    assert before is not None
    killed_s = time.time()
    kill()
    nodes.wait_for_epoch(before.number + 1)
    state = nodes.state()
    assert state.epoch is not None
    nodes.wait_for_step(state.epoch.start.step + 1)
    firsts = [event.time_s for event in nodes.events("first_step") if event.epoch == state.epoch.number]
    return state.epoch.number, max(firsts) - killed_s


if __name__ == "__main__":
    main()
