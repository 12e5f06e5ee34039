"""Plans looked at per second of CPU, with and without what plans have in common: a ratio within one run.

python tests/bench/bench_known_parts.py [case of bench_search_over_plans.py ...]

The changes are those of a climb of :mod:`hetero.planner.improve.whole_plans` from a planned plan. They are scored with
everything made anew for each of them; with known parts; and with known parts where a bound does not rule them out, as
long as their step can still be shorter than the plan's.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.simulation.step_bound import least_step_s
from hetero.cost.simulation.step_limit import StepTooLong
from hetero.cost.stage_memory import stage_memory
from hetero.errors import ConfigError, PlanError
from hetero.plan import lowering, validate
from hetero.plan.ir import Plan
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.plan_changes import families
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.scoring import score_plan
from tests.bench.bench_search_over_plans import CASES

CHANGES = 200
"""Changes that are scored in each way."""


def changes_of(plan: Plan, question: Problem) -> Iterator[Plan]:
    """So many changes of ``plan`` that are other plans, in the order in which a climb could meet them."""
    listed = [change for family in families() for change in family(plan, question)]
    random.Random(0).shuffle(listed)
    for change in listed[:CHANGES]:
        try:
            changed = change()
        except (PlanError, ZeroDivisionError):
            continue
        if changed != plan:
            yield changed


def anew(plan: Plan, question: Problem, below_s: float) -> None:
    """Score with nothing known, and count the stage times as every simulation did."""
    vars(question).pop("known_parts", None)
    lowering._row_of_stage.cache_clear()
    validate._cut_sizes.cache_clear()
    stage_memory.cache_clear()
    found = score_plan(plan, question)
    if found is not None:
        len(found.simulation.stages)


def with_known_parts(plan: Plan, question: Problem, below_s: float) -> None:
    score_plan(plan, question)


def if_not_bounded(plan: Plan, question: Problem, below_s: float) -> None:
    if least_step_s(plan, question.costs) <= below_s:
        score_plan(plan, question, within_s=below_s)


def seconds(
    look: Callable[[Plan, Problem, float], None], plans: Sequence[Plan], question: Problem, below_s: float
) -> float:
    """CPU seconds in which all are looked at."""
    began_s = time.thread_time()
    for plan in plans:
        try:
            look(plan, question, below_s)
        except (PlanError, ConfigError, StepTooLong):
            continue
    return time.thread_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of cases; all by default")
    parser.add_argument("--effort", type=float, default=10.0, help="seconds of counted work for planning")
    args = parser.parse_args()
    for number in args.cases or range(len(CASES)):
        question = CASES[number].problem()
        planned = plan_cluster(question, deadline=Deadline(args.effort, CountedWork()))
        plans = list(changes_of(planned.plan, question))
        before, known, bounded = (
            seconds(look, plans, question, planned.simulation.step_s)
            for look in (anew, with_known_parts, if_not_bounded)
        )
        print(
            f"{number} {CASES[number].name}: {len(plans)} plans, {1e3 * before / len(plans):.1f} ms each; with known "
            f"parts {before / known:.1f} times as many, and if longer steps are left {before / bounded:.1f} times",
            flush=True,
        )


if __name__ == "__main__":
    main()
