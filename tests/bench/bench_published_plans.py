"""Asks the planner about the clusters of published runs, and holds its plans against the published ones.

    python tests/bench/bench_published_plans.py                      questions that several published plans answer
    python tests/bench/bench_published_plans.py --all                those with one published plan as well
    python tests/bench/bench_published_plans.py --family turing      families whose name has this in it
    python tests/bench/bench_published_plans.py --seconds 60         for each question; 20 by default

A question is a model, a batch and a cluster. Planner and prediction are those of our own runtime. Where the planner's
plan is one of the published ones, its measured seconds are known: they are the truth, under the runtime that ran it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.cost_model import CostModel
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs
from hetero.errors import HeteroError
from hetero.plan.ir import Plan, Replica
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from tests.helpers.published_runs import FOLDER, read_all
from tests.helpers.published_runs.published_run import PublishedRun

Pipeline = tuple[object, ...]
"""What decides the time of a pipeline of stages without data parallelism of their own, apart from its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerAnswer:
    """The planner's plan for a question, beside the published ones.

    predicted_s: by run, what is predicted of its plan under our own runtime.
    same: the published run of this very plan, if there is one.
    refusal: the planner's message, where it has no plan.
    """

    runs: Sequence[PublishedRun]
    predicted_s: Sequence[float]
    plan: Plan | None = None
    step_s: float = 0.0
    same: PublishedRun | None = None
    refusal: str = ""

    @property
    def fastest(self) -> PublishedRun:
        """By truth."""
        return min(self.runs, key=lambda run: run.step_s)

    def row(self) -> str:
        """A row of the table."""
        run = self.fastest
        question = f"{run.family}: {run.plan.world_size} GPUs, batch {run.plan.global_batch_size}"
        published = f"{run.label} | {run.step_s:.3f} | {self.predicted_s[self.runs.index(run)]:.3f}"
        if self.plan is None:
            return f"| {question} | {len(self.runs)} | {published} | none: {self.refusal} | | |"
        truth = "not published"
        if self.same is not None:
            truth = f"{self.same.step_s:.3f}" + (", the fastest" if self.same is run else ", slower")
        return f"| {question} | {len(self.runs)} | {published} | {words(self.plan)} | {self.step_s:.3f} | {truth} |"


def questions(runs: Sequence[PublishedRun], *, fewest: int) -> list[list[PublishedRun]]:
    """The runs of each question that at least ``fewest`` of them answer."""
    found: dict[object, list[PublishedRun]] = {}
    for run in runs:
        found.setdefault(run.question, []).append(run)
    return [group for group in found.values() if len(group) >= fewest]


def costs_of(run: PublishedRun) -> CostModel:
    """The costs of a run's model under our own runtime."""
    plan = run.plan
    return model_costs(plan.model, seq_length=plan.seq_length, precision=plan.precision)


def answer(runs: Sequence[PublishedRun], *, seconds: float) -> PlannerAnswer:
    """What the planner says to the question that ``runs`` answer, within so many seconds."""
    run, costs = runs[0], costs_of(runs[0])
    problem = Problem(
        cluster=run.cluster,
        costs=costs,
        global_batch_size=run.plan.global_batch_size,
        distributed_optimizer=run.plan.distributed_optimizer,
        time_limit_s=seconds,
    )
    predicted_s = [simulate(each.plan, each.cluster, costs).step_s for each in runs]
    try:
        result = plan_cluster(problem)
    except HeteroError as error:
        return PlannerAnswer(runs=runs, predicted_s=predicted_s, refusal=str(error))
    ours = pipelines(result.plan)
    return PlannerAnswer(
        runs=runs,
        predicted_s=predicted_s,
        plan=result.plan,
        step_s=result.simulation.step_s,
        same=next((each for each in runs if pipelines(each.plan) == ours), None),
    )


def pipelines(plan: Plan) -> list[Pipeline]:
    """What decides a plan's time, apart from ranks, depths and sequence parallelism, in a fixed order.

    A replica whose stages all have the same data parallelism counts as so many pipelines without.
    """
    return sorted((each for replica in plan.replicas for each in _pipelines(replica)), key=repr)


def _pipelines(replica: Replica) -> list[Pipeline]:
    ways = {stage.dp for stage in replica.stages}
    copies = ways.pop() if len(ways) == 1 else 1
    stages = tuple(
        (
            stage.device,
            stage.start,
            stage.end,
            stage.tp,
            stage.dp // copies,
            stage.micro_batch_size,
            stage.recompute,
            stage.recompute_num_layers,
            stage.wgrad_delay,
        )
        for stage in replica.stages
    )
    return [(replica.num_samples // copies, replica.device_groups, replica.schedule, stages)] * copies


def words(plan: Plan) -> str:
    """A plan in a few words: its kinds of pipelines, each with its stages."""
    kinds = []
    for members in plan.alike():
        replica = plan.replicas[members[0]]
        stages = " ".join(
            f"{stage.device} {stage.num_layers:g} layers tp {stage.tp} dp {stage.dp} mbs {stage.micro_batch_size}"
            + (f" {stage.recompute}" if stage.recompute != "none" else "")
            + (f" delay {stage.wgrad_delay}" if stage.wgrad_delay is not None else "")
            + ";"
            for stage in replica.stages[:4]
        )
        more = f" and {len(replica.stages) - 4} more" if len(replica.stages) > 4 else ""
        kinds.append(
            f"{len(members)} x {len(replica.device_groups)} groups, {len(replica.stages)} stages: {stages}{more}"
        )
    return "; ".join(kinds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--family", default="")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    print("| question | published | fastest | measured s | predicted | planner's plan | predicted | its truth |")
    print("|---|--:|---|--:|--:|---|--:|---|")
    runs = [run for run in read_all(args.folder) if args.family.lower() in run.family.lower()]
    answers = []
    for group in questions(runs, fewest=1 if args.all else 2):
        answers.append(answer(group, seconds=args.seconds))
        print(answers[-1].row(), flush=True)
    planned = [each for each in answers if each.plan is not None]
    no_slower = [each for each in planned if each.step_s <= min(each.predicted_s)]
    slower = [each for each in planned if each.same is not None and each.same is not each.fastest]
    print(
        f"\nOf {len(answers)} questions {len(planned)} have a plan; {len(no_slower)} of these are predicted to be no "
        f"slower than any published one. {sum(each.same is not None for each in planned)} are published ones, of which "
        f"{len(slower)} are not the fastest by truth."
    )


if __name__ == "__main__":
    main()
