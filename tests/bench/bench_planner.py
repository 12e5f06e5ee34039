"""Planning times, gaps and speed-ups over the yardsticks, on the example clusters, from 16 to 4,096 GPUs.

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

from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import yardsticks
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from tests.unit.planner.clusters import GPT_NEO, OPT_30B, OPT_350M, problem

CLUSTERS = Path(__file__).parents[2] / "scripts/presets/clusters"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One cluster of ``scripts/presets/clusters`` and a model.

    target_s: the planning time that is asked for, on two cores.
    target_gap: the gap that is asked for; ``None`` where it only has to be stated.
    """

    name: str
    cluster: str
    model: ModelSpec
    batch: int
    target_s: float
    target_gap: float | None = None

    def problem(self) -> Problem:
        """What the planner is asked, for this long."""
        cluster = load(ClusterSpec, CLUSTERS / self.cluster)
        return problem(cluster, self.model, self.batch, time_limit_s=self.target_s)


CASES = (
    Case(
        name="8 A100-40 + 8 V100-16, GPT-Neo-2.7B",
        cluster="a100_v100.yaml",
        model=GPT_NEO,
        batch=256,
        target_s=5,
        target_gap=0.03,
    ),
    Case(
        name="32 A100-40 + 64 V100-16 + 32 GH200, OPT-350M",
        cluster="a100_v100_gh200_128.yaml",
        model=OPT_350M,
        batch=1024,
        target_s=10,
        target_gap=0.03,
    ),
    Case(
        name="32 A100-40 + 96 V100-16, OPT-350M",
        cluster="a100_v100_128.yaml",
        model=OPT_350M,
        batch=1024,
        target_s=10,
        target_gap=0.03,
    ),
    Case(
        name="32 A100-40 + 32 V100-16 + 32 GH200, OPT-350M",
        cluster="a100_v100_gh200_96.yaml",
        model=OPT_350M,
        batch=1024,
        target_s=10,
        target_gap=0.03,
    ),
    Case(
        name="64 A100-40 + 128 V100-16, OPT-30B",
        cluster="a100_v100_192.yaml",
        model=OPT_30B,
        batch=512,
        target_s=30,
    ),
    Case(
        name="8 A100-40 and 8 V100-16 in two zones, OPT-350M",
        cluster="two_zones.yaml",
        model=OPT_350M,
        batch=256,
        target_s=5,
        target_gap=0.03,
    ),
    Case(
        name="128 A100-40 + 128 GH200, and 256 V100-16 in another zone, OPT-350M",
        cluster="a100_gh200_v100_512.yaml",
        model=OPT_350M,
        batch=4096,
        target_s=30,
    ),
    Case(
        name="1,024 each of A100-40, GH200, V100-16 and RTX-3090, OPT-350M",
        cluster="four_types_4096.yaml",
        model=OPT_350M,
        batch=16384,
        target_s=60,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of clusters; all by default")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    for number in args.cases or range(len(CASES)):
        case = CASES[number]
        question = case.problem()
        cpu_s = time.process_time()
        result = plan_cluster(question)
        asked = "" if case.target_gap is None else f" (asked for {case.target_gap:.0%})"
        print(
            f"{number} {case.name}: planned in {result.planning_s:.1f} s ({time.process_time() - cpu_s:.1f} s of CPU, "
            f"asked for {case.target_s:g} s), step {result.simulation.step_s:.4g} s, "
            f"formula {result.score.step_s if result.score else float('nan'):.4g} s, gap {result.gap:.1%}{asked}, "
            f"{result.num_templates} templates, {len(result.plan.idle_ranks)} idle",
            flush=True,
        )
        if args.compare:
            for other in yardsticks(question):
                found = f"{other.best.step_s / result.simulation.step_s:.3f}x" if other.best else other.why_none
                print(f"    {other.name}: {found}", flush=True)


if __name__ == "__main__":
    main()
