"""Counts what an agent asks of etcd in a second: one that waits, leads, trains or is spare, and behind a proxy.

    python -m tests.bench.bench_etcd_requests [--leases 3 10] [--seconds 10]

Each agent reaches etcd through a proxy of its own, which counts the HTTP requests of all its threads. "waits" is an
agent alone in a job of two nodes. Then two nodes train and a third is spare, as no step gets shorter by it; at last
training stands still. "503" is a proxy that answers so at once, as a load balancer without a server does.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import elastic_words
from tests.helpers.etcd import EtcdServer
from tests.helpers.etcd_proxy import EtcdProxy

NODES = ("a", "b", "c")
STEPS = 1_000_000
_SETTLE_S = 3.0
"""Until what a change has caused is over."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, nargs="+", default=[3, 10], metavar="S")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each count (default: %(default)s)")
    args = parser.parse_args()
    print("| lease | agent | requests a second |\n|--:|---|--:|")
    for lease in args.leases:
        for agent, rate in rates(lease, seconds=args.seconds):
            print(f"| {lease} | {agent} | {rate:.2f} |", flush=True)


def rates(lease: int, *, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield agents, in words, and the requests that each made in a second."""
    with ExitStack() as made:
        folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="bench-requests-")))
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        made.callback(etcd.stop)
        proxies = {name: made.enter_context(EtcdProxy(etcd.url)) for name in NODES}
        options = {"dwell": 0, "min-nodes": 2, "min-gain": 1000, "lease": lease}
        nodes = made.enter_context(
            ElasticCluster(
                folder,
                etcd,
                "bench",
                types=dict.fromkeys(NODES, "box"),
                words=elastic_words(folder, steps=STEPS),
                options=options,
            )
        )

        def start(name: str) -> None:
            nodes.start_as(name, etcd=proxies[name].url)
            nodes.wait_until(lambda state: name in state.nodes)

        start("a")
        yield "waits for a second node", counted(proxies, seconds)["a"]
        start("b")
        nodes.wait_for_commit(3)
        start("c")
        leader = nodes.leader()
        names = {leader: "leads, and its ranks", "c": "spare, while others"}
        names = {name: names.get(name, "its ranks") for name in NODES}
        for name, rate in counted(proxies, seconds).items():
            yield f"{names[name]} train", rate
        nodes.allow(0)
        for name, rate in counted(proxies, seconds).items():
            yield f"{names[name]} stand still", rate
        for proxy in proxies.values():
            proxy.own_answer = (503, "no server is available")
        for name, rate in counted(proxies, seconds).items():
            yield f"503; {names[name]} stand still", rate


def counted(proxies: Mapping[str, EtcdProxy], seconds: float) -> dict[str, float]:
    """Return the requests a second of each proxy, counted for so long."""
    time.sleep(_SETTLE_S)
    before, began_s = {name: proxy.requests.total() for name, proxy in proxies.items()}, time.monotonic()
    time.sleep(seconds)
    lasted_s = time.monotonic() - began_s
    return {name: (proxy.requests.total() - before[name]) / lasted_s for name, proxy in proxies.items()}


if __name__ == "__main__":
    main()
