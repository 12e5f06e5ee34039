"""What a search that knows nothing of the planner still finds above its plans: random moves, judged by the simulator.

python tests/bench/bench_search_over_plans.py                                   every case
python tests/bench/bench_search_over_plans.py 0 3 --evaluations 10000 --effort 30
python tests/bench/bench_search_over_plans.py --effort 10 30 120 --evaluations 0     what more time brings, no search
python tests/bench/bench_search_over_plans.py --processes 4                     planned as on a machine of four cores

Planning has so many seconds of counted work, which are the same on a busy machine, and the search so many evaluations.
It accepts what is a little worse, ever less of that, and goes back to the best plan at times (threshold accepting,
Dueck and Scheuer 1990). Rings have all interfaces of a node, as if that were measured: where it is open, planning ends
with a plan that is good in another case as well, and that is not what the search looks for.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.data import shipped_links
from hetero.errors import ConfigError, PlanError
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, goal_value, score_fitted
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import Link
from hetero.spec.model import ModelSpec
from tests.bench import bench_planner
from tests.bench.random_plan_moves import random_neighbour
from tests.unit.planner.clusters import GPT_NEO, OPT_350M, cluster, problem

ETHERNET = Link(bandwidth_gb_per_s=1.2, latency_us=50.0)
"""Between the nodes of clusters that nobody measured: an assumption."""

WORSE = 0.01
"""By how much worse a plan may be at first to be accepted. A heuristic."""

IN_VAIN = 400
"""Evaluations without a better plan after which the search goes back to its best. A heuristic."""


def unlike_nodes(*nodes: tuple[str, int, int] | tuple[str, int, int, int], model: ModelSpec, batch: int) -> Problem:
    """``(device, GPUs per node, nodes[, GiB])`` of devices whose nodes nobody linked: all by :data:`ETHERNET`."""
    links = shipped_links()
    types = tuple(
        replace(
            links.node_type(device, gpus_per_node=gpus, count=count),
            name=f"{device}-{i}",
            memory_gib=memory[0] if memory else None,
        )
        for i, (device, gpus, count, *memory) in enumerate(nodes)
    )
    return problem(ClusterSpec(node_types=types, links=Links(between_nodes=ETHERNET)), model, batch)


@dataclass(frozen=True, slots=True)
class Case:
    """A question to the planner, made when it is asked."""

    name: str
    problem: Callable[[], Problem]


CASES = (
    Case(
        "3 A100-40 + 5 V100-16 + 6 RTX-3090, GPT-Neo-2.7B",
        lambda: unlike_nodes(("A100-40", 3, 1), ("V100-16", 5, 1), ("RTX-3090", 6, 1), model=GPT_NEO, batch=128),
    ),
    Case(
        "8 A100-40 + 8 V100-16, GPT-Neo-2.7B",
        lambda: problem(cluster(("A100-40", 8, 1), ("V100-16", 8, 1)), GPT_NEO, 256),
    ),
    Case(
        "64 A100-40 + 64 V100-16, GPT-Neo-2.7B",
        lambda: problem(cluster(("A100-40", 8, 8), ("V100-16", 8, 8)), GPT_NEO, 512),
    ),
    Case(
        "5 A100-40 + 3 V100-16, GPT-Neo-2.7B",
        lambda: unlike_nodes(("A100-40", 5, 1), ("V100-16", 3, 1), model=GPT_NEO, batch=60),
    ),
    Case(
        "one per node: 4 A100-40 + 4 V100-16 + 3 RTX-3090, OPT-350M",
        lambda: unlike_nodes(("A100-40", 1, 4), ("V100-16", 1, 4), ("RTX-3090", 1, 3), model=OPT_350M, batch=96),
    ),
    Case(
        "nodes of 6: 12 V100-16, of 3: 3 GH200, GPT-Neo-2.7B",
        lambda: unlike_nodes(("V100-16", 6, 2), ("GH200", 3, 1), model=GPT_NEO, batch=96),
    ),
    Case(
        "unequal memory: 2 A100-40 + 4 V100 of 16 GiB + 4 of 32 GiB + 3 RTX-3090, GPT-Neo-2.7B",
        lambda: unlike_nodes(
            ("A100-40", 2, 1), ("V100-16", 4, 1), ("V100-16", 4, 1, 32), ("RTX-3090", 3, 1), model=GPT_NEO, batch=128
        ),
    ),
    Case(
        "nodes of 5, 3 and 7: 10 RTX-3090 + 3 Titan-RTX + 7 RTX-2080Ti, OPT-350M",
        lambda: unlike_nodes(("RTX-3090", 5, 2), ("Titan-RTX", 3, 1), ("RTX-2080Ti", 7, 1), model=OPT_350M, batch=120),
    ),
    Case(
        "one per node, short of memory: 5 V100-16 + 2 A100-40, GPT-Neo-2.7B",
        lambda: unlike_nodes(("V100-16", 1, 5), ("A100-40", 1, 2), model=GPT_NEO, batch=48),
    ),
    # The first one is here already.
    *(Case(preset.name, preset.problem) for preset in bench_planner.CASES[1:]),
)


def search(start: ScoredPlan, question: Problem, *, evaluations: int, seed: int) -> ScoredPlan:
    """The best plan that so many evaluations of random moves find from ``start`` on."""
    dice = random.Random(seed)
    best = current = start
    evaluated = in_vain = 0
    while evaluated < evaluations:
        plan = random_neighbour(current.plan, question, dice)
        if plan is None or plan == current.plan:
            continue
        evaluated += 1
        in_vain += 1
        try:
            found = score_fitted(plan, question)
        except (PlanError, ConfigError):
            continue
        if found is None:
            continue
        worse = WORSE * dice.random() * (1 - evaluated / evaluations)
        if goal_value(found, question) <= (1 + worse) * goal_value(current, question):
            current = found
        if goal_value(current, question) < goal_value(best, question):
            best, in_vain = current, 0
        elif in_vain > IN_VAIN:
            current, in_vain = best, 0
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of cases; all by default")
    parser.add_argument(
        "--effort", type=float, nargs="+", default=[30.0], help="seconds of counted work for planning, each by itself"
    )
    parser.add_argument("--evaluations", type=int, default=10_000, help="of the search; none with 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="that plan at once, each with so much effort")
    args = parser.parse_args()
    for number in args.cases or range(len(CASES)):
        case = CASES[number]
        print(f"{number} {case.name}")
        for effort in args.effort:
            question = case.problem()
            question = replace(question, cluster=question.cluster.with_ring_interfaces("all"))
            begun_s = time.thread_time()
            planned = plan_cluster(question, deadline=Deadline(effort, CountedWork()), processes=args.processes).scored
            planned_s = time.thread_time()
            print(
                f"    {effort:g} s: {planned.step_s:.5g} s per step in {planned_s - begun_s:.0f} s of CPU", flush=True
            )
            if args.evaluations:
                found = search(planned, question, evaluations=args.evaluations, seed=args.seed)
                print(
                    f"        {args.evaluations} evaluations in {time.thread_time() - planned_s:.0f} s of CPU find "
                    f"{found.step_s:.5g} s, {planned.step_s / found.step_s - 1:.2%} above",
                    flush=True,
                )


if __name__ == "__main__":
    main()
