"""Asks the planner about the clusters of published runs, and holds its plans against the published ones.

    python tests/bench/bench_published_plans.py                      questions that several published plans answer
    python tests/bench/bench_published_plans.py --all                those with one published plan as well
    python tests/bench/bench_published_plans.py --family titan       families whose name has this in it
    python tests/bench/bench_published_plans.py --seconds 60         for each question; 20 by default

A question is a model, a batch and a cluster. The planner plans for our own runtime. Seconds are predicted for ours, and
behind the stroke for the runtime that ran the published plans, where that can execute the plan. Where the planner's
plan is one of the published ones, its measured seconds are known: they are the truth, under the runtime that ran it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import simulate
from hetero.errors import HeteroError, PlanError, ScheduleError
from hetero.plan.ir import Plan, Replica
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from tests.helpers.cost_comparison import costs_of
from tests.helpers.published_runs import FOLDER, read_all
from tests.helpers.published_runs.published_run import PublishedRun

Pipeline = tuple[object, ...]
"""What decides the time of a pipeline of stages without data parallelism of their own, apart from its ranks."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step of one plan under our own runtime, and under theirs if that can execute it."""

    ours_s: float
    theirs_s: float | None

    def __str__(self) -> str:
        return f"{self.ours_s:.3f}" + (f" / {self.theirs_s:.3f}" if self.theirs_s is not None else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerAnswer:
    """The planner's plan for a question, beside the published ones.

    predicted: by run, what is predicted of its plan.
    planned: what is predicted of the planner's.
    same: the published run of this very plan, if there is one.
    refusal: the planner's message, where it has no plan.
    """

    runs: Sequence[PublishedRun]
    predicted: Sequence[Predicted]
    plan: Plan | None = None
    planned: Predicted | None = None
    same: PublishedRun | None = None
    refusal: str = ""

    @property
    def fastest(self) -> PublishedRun:
        """By truth."""
        return min(self.runs, key=lambda run: run.step_s)

    @property
    def is_no_slower(self) -> bool:
        """By prediction for our own runtime, than any published plan."""
        return self.planned is not None and self.planned.ours_s <= min(each.ours_s for each in self.predicted)

    @property
    def is_slower_under_theirs(self) -> bool:
        """By prediction for the runtime of the published plans, if that can execute it, than the fastest of them."""
        theirs_s = self.planned.theirs_s if self.planned is not None else None
        return theirs_s is not None and theirs_s > min(each.theirs_s or 0.0 for each in self.predicted)

    def row(self) -> str:
        """A row of the table."""
        run = self.fastest
        question = f"{run.family}: {run.plan.world_size} GPUs, batch {run.plan.global_batch_size}"
        published = f"{run.label} | {run.step_s:.3f} | {self.predicted[self.runs.index(run)]}"
        if self.plan is None:
            return f"| {question} | {len(self.runs)} | {published} | none: {self.refusal} | | |"
        truth = "not published"
        if self.same is not None:
            truth = f"{self.same.step_s:.3f}" + (", the fastest" if self.same is run else ", slower")
        return f"| {question} | {len(self.runs)} | {published} | {words(self.plan)} | {self.planned} | {truth} |"


def questions(runs: Sequence[PublishedRun], *, fewest: int) -> list[list[PublishedRun]]:
    """The runs of each question that at least ``fewest`` of them answer."""
    found: dict[object, list[PublishedRun]] = {}
    for run in runs:
        found.setdefault(run.question, []).append(run)
    return [group for group in found.values() if len(group) >= fewest]


def predicted(plan: Plan, run: PublishedRun) -> Predicted:
    """What is predicted of ``plan`` on the cluster of ``run``."""
    ours_s = simulate(plan, run.cluster, costs_of(run, HETERO)).step_s
    try:
        theirs_s = simulate(plan, run.cluster, costs_of(run, run.runtime)).step_s
    except (PlanError, ScheduleError):
        theirs_s = None
    return Predicted(ours_s, theirs_s)


def answer(runs: Sequence[PublishedRun], *, seconds: float) -> PlannerAnswer:
    """What the planner says to the question that ``runs`` answer, within so many seconds."""
    run = runs[0]
    problem = Problem(
        cluster=run.cluster,
        costs=costs_of(run, HETERO),
        global_batch_size=run.plan.global_batch_size,
        distributed_optimizer=run.plan.distributed_optimizer,
        time_limit_s=seconds,
    )
    of_runs = [predicted(each.plan, each) for each in runs]
    try:
        plan = plan_cluster(problem).plan
    except HeteroError as error:
        return PlannerAnswer(runs=runs, predicted=of_runs, refusal=str(error))
    ours = pipelines(plan)
    return PlannerAnswer(
        runs=runs,
        predicted=of_runs,
        plan=plan,
        planned=predicted(plan, run),
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
    every = list(read_all(args.folder))
    runs = [run for run in every if args.family.lower() in run.family.lower()]
    if not runs:
        families = "; ".join(sorted({run.family for run in every}))
        parser.error(f"--family {args.family}: no family of {args.folder} has this in its name: {families}")
    print("| question | published | fastest | measured s | predicted | planner's plan | predicted | its truth |")
    print("|---|--:|---|--:|--:|---|--:|---|")
    answers = []
    for group in questions(runs, fewest=1 if args.all else 2):
        answers.append(answer(group, seconds=args.seconds))
        print(answers[-1].row(), flush=True)
    planned = [each for each in answers if each.plan is not None]
    published = [each for each in planned if each.same is not None]
    no_slower = sum(each.is_no_slower for each in planned)
    slower = sum(each.is_slower_under_theirs for each in planned)
    print(
        f"\nOf {len(answers)} questions {len(planned)} have a plan.\n"
        f"Predicted for our own runtime, {no_slower} of these are no slower than any published one.\n"
        f"Predicted for that of the published plans, {slower} are slower.\n"
        f"{len(published)} are published ones, of which "
        f"{sum(each.same is not each.fastest for each in published)} are not the fastest by truth."
    )


if __name__ == "__main__":
    main()
