"""Planning times, gaps and speed-ups over the yardsticks, on clusters from 16 to 4,096 GPUs.

python tests/bench/bench_planner.py                 every cluster, planning only
python tests/bench/bench_planner.py --compare 0 1   clusters 0 and 1 with their yardsticks
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.planner.baselines import yardsticks
from hetero.planner.solver import plan_cluster
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from tests.unit.planner.clusters import GPT_NEO, OPT_30B, OPT_350M, cluster, problem

HOME, FAR = "us-central1", "us-west1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One cluster and model. ``target_s`` is the planning time that is asked for, on two cores."""

    name: str
    cluster: ClusterSpec
    model: ModelSpec
    batch: int
    target_s: float


CASES = (
    Case(
        name="8 A100-40 + 8 V100-16, GPT-Neo-2.7B",
        cluster=cluster(("A100-40", 8, 1), ("V100-16", 8, 1)),
        model=GPT_NEO,
        batch=256,
        target_s=5,
    ),
    Case(
        name="32 A100-40 + 96 V100-16, OPT-350M",
        cluster=cluster(("A100-40", 4, 8), ("V100-16", 4, 24)),
        model=OPT_350M,
        batch=1024,
        target_s=10,
    ),
    Case(
        name="32 A100-40 + 32 V100-16 + 32 GH200, OPT-350M",
        cluster=cluster(("A100-40", 4, 8), ("V100-16", 4, 8), ("GH200", 4, 8)),
        model=OPT_350M,
        batch=1024,
        target_s=10,
    ),
    Case(
        name="64 A100-40 + 128 V100-16, OPT-30B",
        cluster=cluster(("A100-40", 4, 16), ("V100-16", 4, 32)),
        model=OPT_30B,
        batch=512,
        target_s=30,
    ),
    Case(
        name="8 A100-40 and 8 V100-16 in two zones, OPT-350M",
        cluster=cluster(("A100-40", 4, 2, HOME), ("V100-16", 4, 2, FAR)),
        model=OPT_350M,
        batch=256,
        target_s=5,
    ),
    Case(
        name="128 A100-40 + 128 GH200, and 256 V100-16 in another zone, OPT-350M",
        cluster=cluster(("A100-40", 8, 16, HOME), ("GH200", 4, 32, HOME), ("V100-16", 8, 32, FAR)),
        model=OPT_350M,
        batch=4096,
        target_s=30,
    ),
    Case(
        name="1,024 each of A100-40, GH200, V100-16 and RTX-3090, OPT-350M",
        cluster=cluster(
            ("A100-40", 8, 128, HOME), ("GH200", 4, 256, HOME), ("V100-16", 8, 128, HOME), ("RTX-3090", 8, 128, FAR)
        ),
        model=OPT_350M,
        batch=16384,
        target_s=60,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of clusters; all by default")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    for number in args.cases or range(len(CASES)):
        case = CASES[number]
        question = problem(case.cluster, case.model, case.batch, time_limit_s=case.target_s)
        cpu_s = time.process_time()
        result = plan_cluster(question)
        print(
            f"{number} {case.name}: planned in {result.planning_s:.1f} s ({time.process_time() - cpu_s:.1f} s of CPU, "
            f"asked for {case.target_s:g} s), step {result.simulation.step_s:.4g} s, "
            f"formula {result.score.step_s:.4g} s, gap {result.gap:.1%}, "
            f"{result.num_templates} templates, {len(result.plan.idle_ranks)} idle",
            flush=True,
        )
        if args.compare:
            for other in yardsticks(question):
                found = f"{other.best.step_s / result.simulation.step_s:.3f}x" if other.best else "does not fit"
                print(f"    {other.name}: {found}", flush=True)


if __name__ == "__main__":
    main()
