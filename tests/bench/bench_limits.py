"""How far planning goes beyond its time limit on extreme questions: nowhere more than 2 s is asked for.

python tests/bench/bench_limits.py                     every question, with limits of 1 and 5 s
python tests/bench/bench_limits.py --limit 3 --only layers
"""

import argparse
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.errors import PlanError
from hetero.planner.plan_cluster import plan_cluster
from tests.unit.planner.extreme_questions import EXTREME

MOST_BEYOND_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, action="append", metavar="S", help="seconds (default: 1 and 5)")
    parser.add_argument("--only", default="", metavar="WORD", help="questions with this in their name")
    args = parser.parse_args()
    for name, question in EXTREME.items():
        for limit_s in args.limit or (1.0, 5.0):
            if args.only not in name:
                continue
            asked = question.make(limit_s)
            start_s, processor_s = time.monotonic(), time.process_time()
            try:
                result = plan_cluster(asked)
                outcome = f"{result.simulation.step_s:.4g} s per step, none below {result.lower_bound_s:.4g} s"
            except PlanError as error:
                outcome = str(error)[:60]
            beyond_s = time.monotonic() - start_s - limit_s
            processor_s = time.process_time() - processor_s
            verdict = "TOO LONG" if beyond_s > MOST_BEYOND_S else "kept"
            print(
                f"{name}, limit {limit_s:g} s: {verdict}, {beyond_s:+.1f} s ({processor_s:.1f} s of processor time); "
                f"{outcome}",
                flush=True,
            )


if __name__ == "__main__":
    main()
