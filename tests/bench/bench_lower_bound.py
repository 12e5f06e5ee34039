"""Where the gap between the planner's plans and the bound for any plan lies, on the example clusters up to 128 GPUs.

python tests/bench/bench_lower_bound.py            every cluster up to 128 GPUs
python tests/bench/bench_lower_bound.py 0 --effort-s 30

Planning is counted work (:class:`hetero.planner.deadline.CountedWork`), so that it does not depend on what else the
machine does. A row is the share of the cluster's speed that goes into each thing: a device counts with the layers per
second that it reaches at its best tp and microbatch. ``work`` is what a step would take if all devices were at work at
that speed all the time, which is all that the bound knows of most clusters.
"""

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.layers.stage_modules import module_counts
from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.profile import HALVES, LAYER_KINDS, ModuleKind
from tests.bench.bench_planner import CASES, CLUSTERS
from tests.unit.planner.clusters import problem

MOST_DEVICES = 128
"""Of the clusters that are planned by default."""

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Among which a device's best one is looked for, whether it fits or not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=int, help="numbers of clusters of bench_planner.py")
    parser.add_argument("--effort-s", type=float, default=15.0, help="seconds of counted work for each plan")
    args = parser.parse_args()
    for number, case in enumerate(CASES):
        question = problem(load(ClusterSpec, CLUSTERS / case.cluster), case.model, case.batch)
        if number not in args.cases if args.cases else question.cluster.num_devices > MOST_DEVICES:
            continue
        result = plan_cluster(question, deadline=Deadline(args.effort_s, CountedWork()))
        whole_backward = dataclasses.replace(question, splits_backward=False)
        whole, alone = (
            1 - lower_bound_s(each) / result.simulation.step_s
            for each in (whole_backward, dataclasses.replace(whole_backward, interleaves=False))
        )
        print(
            f"{number} {case.name}: {result.simulation.step_s:.4g} s, none below {result.lower_bound_s:.4g} s, gap to "
            f"any plan {result.gap_to_any:.1%}, without split backwards {whole:.1%}, without interleaving as well "
            f"{alone:.1%}"
        )
        print(
            "    " + ", ".join(f"{name} {share:.1%}" for name, share in account(result, question).items()), flush=True
        )


def account(result: PlanResult, question: Problem) -> Mapping[str, float]:
    """Shares of the cluster's speed, which add up to 1."""
    simulation, found = result.simulation, defaultdict[str, float](float)
    best = {each.index: best_s(each, question) for each in question.node_types}
    speeds = {index: 1 / of_kinds["block"] for index, of_kinds in best.items()}
    whole = sum(each.num_devices * speeds[each.index] for each in question.node_types)
    for r, replica in enumerate(result.plan.replicas):
        for group in replica.device_groups:
            first = replica.stages[group[0]]
            index = question.node_type_of(first.ranks[0]).index
            work_s = 0.0
            for s in group:
                stage = replica.stages[s]
                counts = module_counts(stage.start, stage.end, num_layers=question.model.num_layers)
                each_s = sum(count * best[index][kind] for kind, count in counts.items())
                work_s += replica.num_samples / len(stage.ranks) * each_s
            times = simulation.stages[r, group[0]]
            share = len(first.ranks) * speeds[index] / whole / simulation.step_s
            found["work"] += share * work_s
            found["slower than at best"] += share * (times.busy_s - work_s)
            found["bubble"] += share * times.bubble_s
            found["sums of gradients"] += share * times.sync_s
            found["update and waiting for it"] += share * (
                simulation.step_s - times.busy_s - times.bubble_s - times.sync_s
            )
    found["idle devices"] = 1 - sum(found.values())
    return found


def best_s(node_type: PlannerNodeType, question: Problem) -> Mapping[ModuleKind, float]:
    """Device-seconds of a sample in a layer of each kind, forward and backward, at the best tp and microbatch."""
    tps = StageOptionTable(question).legal_tps(node_type.gpus_per_node)
    found: dict[ModuleKind, float] = {}
    for kind in (*LAYER_KINDS, *HALVES):
        costs = {
            (tp, size): question.costs.layer(
                kind,
                device=node_type.device,
                tp=tp,
                micro_batch_size=size,
                sequence_parallel=question.splits_sequence(tp),
            )
            for tp in tps
            for size in MICROBATCHES
        }
        found[kind] = min(tp * (cost.forward_s + cost.backward_s) / size for (tp, size), cost in costs.items())
    return found


if __name__ == "__main__":
    main()
