"""What hosts cost planning where everything fits on the devices and nothing is left to them.

    python -m tests.bench.bench_offload_planning              three clusters, 10 seconds of counted work each
    python -m tests.bench.bench_offload_planning --repeats 5

Each cluster is planned without descriptions of its hosts, with them and ``--offload none``, and with them and
``--offload auto``. Work is counted, so all three take the same course as long as nobody asks hosts, on a busy machine
too; seconds of the processor are the least of all repeats. Whatever is left of the limit goes to the search over whole
plans, or without that to the construction of others: what hosts cost is in processor seconds of the same counted work.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

from rich.console import Console
from rich.table import Table

from hetero.plan.ir import Plan
from hetero.plan.offload import NOTHING_ON_HOST
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve import passes
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from tests.bench.bench_planner import CASES, CLUSTERS, Case
from tests.unit.planner.clusters import problem

FITTING = (1, 3, 5)
"""Numbers of cases of ``bench_planner`` whose models fit every device."""

COPY = Link(bandwidth_gb_per_s=24.0, latency_us=10.0)
HOST = HostProfile(
    source="assumed, as in bench_offload",
    memory_gib=512,
    updates=(UpdateRate(threads=1, elements_per_s=1.2e8), UpdateRate(threads=48, elements_per_s=4e9)),
    memory_copy_gb_per_s=80.0,
    to_host=COPY,
    to_device=COPY,
)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one planning, of the processor and counted: without the search over whole plans, and with it."""

    without_search_s: float
    counted_without_search_s: float
    whole_s: float
    counted_s: float
    num_templates: int
    plan: Plan


def questions(case: Case) -> Iterator[tuple[str, Problem]]:
    """The three, by name."""
    cluster = load(ClusterSpec, CLUSTERS / case.cluster)
    described = dataclasses.replace(
        cluster, node_types=tuple(dataclasses.replace(each, host=HOST) for each in cluster.node_types)
    )
    without = problem(cluster, case.model, case.batch, distributed_optimizer=True)
    yield "not described", without
    yield "described, none", dataclasses.replace(without, cluster=described, offload="none")
    yield "described, auto", dataclasses.replace(without, cluster=described)


def timed(question: Problem, limit_s: float) -> tuple[float, float, PlanResult]:
    """Seconds of the processor, counted ones, and the result."""
    timer = CountedWork()
    begun_s = time.process_time()
    found = plan_cluster(question, deadline=Deadline(limit_s, timer))
    return time.process_time() - begun_s, timer.now_s(), found


def spent(question: Problem, limit_s: float) -> Spent:
    without_search = tuple(row for row in passes.PASSES if row.going_on is None)
    with mock.patch.object(passes, "PASSES", without_search):
        without_s, counted_without_s, _ = timed(question, limit_s)
    # Nothing is known of the other run's steps.
    whole_s, counted_s, found = timed(dataclasses.replace(question), limit_s)
    return Spent(without_s, counted_without_s, whole_s, counted_s, found.num_templates, found.plan)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of counted work for each plan")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(argv)
    table = Table(title="planning where everything fits: seconds of the processor | of counted work")
    for column in ("cluster", "hosts", "without the search over whole plans", "in all", "times the first", "templates"):
        table.add_column(column)
    for number in FITTING:
        case = CASES[number]
        asked = dict(questions(case))
        runs: dict[str, list[Spent]] = {name: [] for name in asked}
        for _ in range(args.repeats):
            for name, question in asked.items():
                runs[name].append(spent(dataclasses.replace(question), args.time_limit))
        first = min(runs["not described"], key=lambda each: each.whole_s)
        for name, each in runs.items():
            least = min(each, key=lambda run: run.whole_s)
            without_s = min(run.without_search_s for run in each)
            same = "the same plan" if least.plan.replicas == first.plan.replicas else "another plan"
            nothing = all(stage.offload == NOTHING_ON_HOST for _, _, stage in least.plan.stages())
            table.add_row(
                case.name,
                name,
                f"{without_s:.2f} | {least.counted_without_search_s:.3f}",
                f"{least.whole_s:.2f} | {least.counted_s:.3f}",
                f"{least.whole_s / first.whole_s:.2f}, {same}{'' if nothing else ', something is left to hosts'}",
                str(least.num_templates),
            )
        table.add_section()
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
