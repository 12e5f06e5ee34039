"""Measures how long a loss takes, from the kill to the end of the next step: real agents and ranks on this machine.

    python -m tests.bench.bench_change [--nodes 3] [--turns 5]

In turns a rank is killed, and a node with all that runs on it; that comes back, and joins, before the next turn. The
model is tiny, so that what is measured are processes, groups and the protocol: bench_recovery has what state takes.
Needs two free cores: after a loss each rank of this machine computes where a host of its own would.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hetero.elastic.run_history import read_history
from hetero.report.elastic_run import PHASES
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import elastic_words
from tests.helpers.etcd import EtcdServer

STEPS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    names = [f"node{i}" for i in range(args.nodes)]
    losses: dict[str, list[tuple[int, float]]] = {"rank": [], "node": []}
    with tempfile.TemporaryDirectory(prefix="bench-change-") as made:
        folder = Path(made)
        etcd = EtcdServer(folder / "etcd")
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
