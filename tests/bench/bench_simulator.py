"""Seconds to simulate plans: a planner's plans for 128 and 4,096 GPUs, replicas alike and unlike, stages with lanes.

    python tests/bench/bench_simulator.py                  every plan
    python tests/bench/bench_simulator.py --repeats 50

The shapes are those that the planner finds for the example clusters (tests/bench/bench_planner.py), written out so that
nothing but the simulator runs. Each figure is the least processor time of several runs, with that of other sums of
gradients for the same pipeline (``with_gradient_sync``) beside it. Compare two versions in alternating runs.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.cost_model import CostModel
from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import simulate, with_gradient_sync
from hetero.plan.ir import Plan, Replica
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.bench.bench_planner import CLUSTERS
from tests.helpers.plans import stage
from tests.unit.planner.clusters import OPT_350M, problem

SEQ_LENGTH = 2048


def replica_of(
    devices: Sequence[tuple[str, int]], shapes: Sequence[tuple[int, int, int]], *, num_samples: int
) -> Replica:
    """Stages of as many layers each.

    Args:
        devices: device type and first rank of each stage.
        shapes: (dp, micro_batch_size, in_flight) of each stage.
    """
    each = OPT_350M.num_layers // len(shapes)
    stages = [
        stage(
            layers=(s * each, (s + 1) * each),
            ranks=range(first, first + dp),
            dp=dp,
            mbs=mbs,
            depth=depth,
            device=device,
        )
        for s, ((device, first), (dp, mbs, depth)) in enumerate(zip(devices, shapes, strict=True))
    ]
    return Replica(num_samples=num_samples, stages=tuple(stages))


def plan_of(replicas: Sequence[Replica], num_devices: int) -> Plan:
    working = {rank for each in replicas for stage in each.stages for rank in stage.ranks}
    return Plan(
        model=OPT_350M,
        seq_length=SEQ_LENGTH,
        global_batch_size=sum(each.num_samples for each in replicas),
        replicas=tuple(replicas),
        idle_ranks=tuple(sorted(set(range(num_devices)) - working)),
    )


def plans() -> Iterator[tuple[str, ClusterSpec, Plan]]:
    """Name, cluster and plan."""
    three = load(ClusterSpec, CLUSTERS / "a100_v100_gh200_128.yaml")
    first = first_ranks(three)
    places = [(device, first[device]) for device in ("A100-40", "V100-16", "GH200")]
    yield (
        "128 GPUs, dp 32 64 32",
        three,
        plan_of([replica_of(places, [(32, 2, 5), (64, 1, 3), (32, 1, 1)], num_samples=1024)], 128),
    )
    yield (
        "128 GPUs, 32 replicas alike, dp 1 1 1",
        three,
        plan_of(
            [
                replica_of([(d, r + i) for d, r in places], [(1, 1, 4), (1, 1, 2), (1, 1, 1)], num_samples=32)
                for i in range(32)
            ],
            128,
        ),
    )
    yield (
        "128 GPUs, 32 replicas unlike, dp 1 2 1",
        three,
        plan_of(
            [
                replica_of(
                    [
                        (places[0][0], places[0][1] + i),
                        (places[1][0], places[1][1] + 2 * i),
                        (places[2][0], places[2][1] + i),
                    ],
                    [(1, 1, 6), (2, 1, 2), (1, 1, 2)],
                    num_samples=2 * (8 + i),
                )
                for i in range(32)
            ],
            128,
        ),
    )
    four = load(ClusterSpec, CLUSTERS / "four_types_4096.yaml")
    first = first_ranks(four)
    places = [(device, first[device]) for device in first]
    yield (
        "4,096 GPUs, 128 replicas alike, dp 4 8 8 4",
        four,
        plan_of(
            [
                replica_of(
                    [(device, rank + dp * i) for (device, rank), dp in zip(places, (4, 8, 8, 4), strict=True)],
                    [(4, 2, 7), (8, 1, 5), (8, 1, 3), (4, 1, 2)],
                    num_samples=128,
                )
                for i in range(128)
            ],
            four.num_devices,
        ),
    )
    yield (
        "4,096 GPUs, 8 replicas alike, dp 128",
        four,
        plan_of(
            [
                replica_of(
                    [(device, rank + 128 * i) for device, rank in places],
                    [(128, 1, 4 - s) for s in range(4)],
                    num_samples=2048,
                )
                for i in range(8)
            ],
            four.num_devices,
        ),
    )


def first_ranks(cluster: ClusterSpec) -> dict[str, int]:
    """By device type, the first rank that has it."""
    found: dict[str, int] = {}
    for rank in range(cluster.num_devices):
        found.setdefault(cluster.node_type_of_rank(rank).device, rank)
    return found


def least_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started_s = time.process_time()
        work()
        seconds.append(time.process_time() - started_s)
    return min(seconds)


def costs_of(cluster: ClusterSpec, batch: int) -> CostModel:
    return problem(cluster, OPT_350M, batch).costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{'plan':46} {'simulate ms':>12} {'other sums ms':>14} {'step s':>9}")
    for name, cluster, plan in plans():
        costs, topology = costs_of(cluster, plan.global_batch_size), Topology(cluster)
        simulation = simulate(plan, topology, costs)
        whole_s = least_s(lambda: simulate(plan, topology, costs), args.repeats)  # noqa: B023 - used at once
        sync = dataclasses.replace(plan.gradient_sync, bucket_numel=20_000_000)
        sums_s = least_s(lambda: with_gradient_sync(simulation, sync, topology, costs), args.repeats)  # noqa: B023
        print(f"{name:46} {whole_s * 1e3:12.2f} {sums_s * 1e3:14.2f} {simulation.step_s:9.4f}", flush=True)


if __name__ == "__main__":
    main()
