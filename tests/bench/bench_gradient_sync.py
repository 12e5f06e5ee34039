"""What domains and bucket sizes are worth on the example clusters, by the simulator: each plan with them and without.

python tests/bench/bench_gradient_sync.py          every cluster of bench_planner.py
python tests/bench/bench_gradient_sync.py 0 5      clusters 0 and 5
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.simulation.simulator import Simulation, with_gradient_sync
from hetero.plan.ir import GradientSyncPlan
from hetero.planner import construction
from hetero.planner.improve import passes
from hetero.planner.improve.gradient_sync import choose_domains, choose_gradient_sync
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.scoring import ScoredPlan
from hetero.report.plan_wording import gradient_sync_of
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.bench.bench_planner import CASES, CLUSTERS
from tests.unit.planner.clusters import problem


def exposed_s(simulation: Simulation) -> float:
    """By how much the last sum outlasts the last backward."""
    return max((sync.end_s for sync in simulation.syncs), default=0.0) - simulation.compute_end_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of clusters; all by default")
    args = parser.parse_args()
    for number in args.cases or range(len(CASES)):
        case = CASES[number]
        question = problem(
            load(ClusterSpec, CLUSTERS / case.cluster), case.model, case.batch, time_limit_s=case.target_s
        )
        choosing_s = 0.0

        def timed(choose: Callable[..., ScoredPlan]) -> Callable[..., ScoredPlan]:
            def choosing(*args: object, **named: object) -> ScoredPlan:
                nonlocal choosing_s
                started_s = time.perf_counter()
                found = choose(*args, **named)
                choosing_s += time.perf_counter() - started_s
                return found

            return choosing

        rows = (
            dataclasses.replace(row, improve=timed(row.improve)) if row.improve is choose_gradient_sync else row
            for row in passes.PASSES
        )
        with (
            mock.patch.object(passes, "PASSES", tuple(rows)),
            mock.patch.object(construction, "choose_domains", timed(choose_domains)),
        ):
            result = plan_cluster(question)
        plain = with_gradient_sync(result.simulation, GradientSyncPlan(), question.topology, question.costs)
        print(
            f"{number} {case.name}: step {result.simulation.step_s:.4g} s, without {plain.step_s:.4g} s "
            f"({plain.step_s / result.simulation.step_s:.3f}x); exposed sums {exposed_s(result.simulation):.3g} s, "
            f"without {exposed_s(plain):.3g} s; chosen in {choosing_s:.2f} of {result.planning_s:.1f} s: "
            f"{gradient_sync_of(result.plan) or 'nothing'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
