"""How near counted work is to processor seconds, and how well a time limit is kept.

python tests/bench/bench_deadlines.py        every question
python tests/bench/bench_deadlines.py 0 3    questions 0 and 3

Tests of the planner count its work (``hetero.planner.deadline.CountedWork``), so that they end at the same point on
every machine. What the count says of seconds is an estimate; here it is held against them.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.errors import PlanError
from hetero.planner.deadline import CountedWork, Deadline, Timer, WallTime
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.bench.bench_planner import CASES, CLUSTERS
from tests.unit.planner.clusters import cluster, opt_model, problem

LARGE_BATCHES = (100_003, 1_000_000)
"""Each simulation of so many microbatches takes long."""

SHARES = (1.0, 0.1)
"""Of the time that bench_planner.py gives a cluster."""


def questions() -> Iterator[tuple[str, Problem, float]]:
    """Each with its name and a time limit in seconds."""
    for case in CASES:
        spec = load(ClusterSpec, CLUSTERS / case.cluster)
        for share in SHARES:
            yield case.name, problem(spec, case.model, case.batch), share * case.target_s
    small = cluster(("A100-40", 2, 1), ("V100-16", 2, 1))
    for batch in LARGE_BATCHES:
        yield f"2 A100-40 + 2 V100-16, batch {batch:,}", problem(small, opt_model(4, 1024, 16), batch), 5.0


def taken_s(question: Problem, limit_s: float, timer: Timer) -> tuple[str, float, float, float]:
    """What came of it; seconds by ``timer``, of the wall clock and of the processor."""
    deadline = Deadline(limit_s, timer)
    wall_s, processor_s = time.monotonic(), time.process_time()
    try:
        outcome = f"step {plan_cluster(question, deadline=deadline).simulation.step_s:.4g} s"
    except PlanError:
        outcome = "no plan"
    return outcome, deadline.elapsed_s, time.monotonic() - wall_s, time.process_time() - processor_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", type=int, help="numbers of questions; all by default")
    args = parser.parse_args()
    for number, (name, question, limit_s) in enumerate(questions()):
        if args.questions and number not in args.questions:
            continue
        outcome, counted_s, _, processor_s = taken_s(question, limit_s, CountedWork())
        print(
            f"{number} {name}, limit {limit_s:g} s\n"
            f"    counted {counted_s:.2f} s, took {processor_s:.2f} s of processor time: "
            f"{processor_s / counted_s:.2f} times the count; {outcome}",
            flush=True,
        )
        outcome, _, wall_s, _ = taken_s(question, limit_s, WallTime())
        print(f"    of time that passes {wall_s:.2f} s: {wall_s / limit_s:.2f} times the limit; {outcome}", flush=True)


if __name__ == "__main__":
    main()
