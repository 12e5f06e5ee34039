"""Plans as others do, each at its best and scored by the same simulator: yardsticks for the planner.

uniform         Megatron-LM: one (tp, pp, dp, microbatch, recomputation) for all GPUs, by exhaustive search
uniform, <types> the same on the GPUs of some of the node types, the others idle
whale           Whale (arXiv 2011.09208): a uniform grid whose layers and samples follow the devices' peak FLOPS
autohet         AutoHet (arXiv 2512.20953): replicas of near-equal power with equal shares, one tp, layers by measured
                speed and memory
harp            HARP (arXiv 2509.24859): one pipeline over all sub-clusters, tensor and data parallelism inside one

Each is our reading of a published idea with this project's costs, memory check and runtime, not the authors' program.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hetero.planner.deadline import Deadline
from hetero.planner.listed.grid_plans import every_uniform, whale_plans
from hetero.planner.listed.listed_plans import Listing, TooLarge, best_plan
from hetero.planner.listed.published_planners import autohet_plans, harp_plans
from hetero.planner.problem import Problem
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.scoring import ScoredPlan, goal_value


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A yardstick's best plan; ``None`` if none of its plans fits, or if there was no time to find one that does.

    timed_out: the time for it ended before all of its plans were looked at.
    closest: of the plans that do not fit, the one that lacks least; ``None`` if there are none.
    budget_per_hour: that its plans had to keep; ``None`` without one.
    """

    name: str
    best: ScoredPlan | None
    timed_out: bool = False
    closest: TooLarge | None = None
    budget_per_hour: float | None = None

    @property
    def why_none(self) -> str:
        """What is said in the place of a plan. That there is none is said only if all were looked at: what the closest
        is short of, or that nothing has such a shape, as where no degrees divide the devices and the batch, or costs
        so little."""
        if self.timed_out:
            return "not found in time"
        if self.closest is not None:
            return f"does not fit: {self.closest}"
        budget = "" if self.budget_per_hour is None else f" within a budget of {self.budget_per_hour:g} per hour"
        return f"no such plan is possible{budget}"

    @property
    def is_uniform(self) -> bool:
        """Whether all GPUs that it uses have one and the same degrees."""
        return self.name.startswith("uniform")


def yardsticks(problem: Problem, *, limit_s: float = 60.0) -> tuple[Yardstick, ...]:
    """The best plan of each yardstick in the order of this file's head; each is searched for ``limit_s`` seconds at
    most.

    Half of the time goes into listing plans with their seconds by a formula, half into simulating the best of them.
    """
    stage_options = StageOptionTable(problem)
    every = every_uniform(problem, stage_options) | {
        "whale": whale_plans(problem, stage_options),
        "autohet": autohet_plans(problem, stage_options),
        "harp": harp_plans(problem, stage_options),
    }
    return tuple(_yardstick(name, plans, problem, limit_s) for name, plans in every.items())


def uniform_yardsticks(problem: Problem, *, limit_s: float = 60.0) -> tuple[Yardstick, ...]:
    """Search the best uniform plan on all GPUs, and on those of each choice of node types, for ``limit_s`` seconds each
    at most."""
    every = every_uniform(problem, StageOptionTable(problem))
    return tuple(_yardstick(name, plans, problem, limit_s) for name, plans in every.items())


def best_uniform(problem: Problem, *, limit_s: float = 60.0) -> Yardstick:
    """Search the best uniform plan, on all GPUs or on those of some node types; without a plan if none was found."""
    return choose_uniform(uniform_yardsticks(problem, limit_s=limit_s), problem)


def choose_uniform(found: Iterable[Yardstick], problem: Problem) -> Yardstick:
    """Return the one with the best uniform plan by the goal of ``problem``; one without a plan if none has any."""
    uniform = [each for each in found if each.is_uniform]
    return min(
        (each for each in uniform if each.best is not None),
        key=lambda each: math.inf if each.best is None else goal_value(each.best, problem),
        default=Yardstick(
            name="uniform",
            best=None,
            timed_out=any(each.timed_out for each in uniform),
            closest=_closest(each.closest for each in uniform),
            budget_per_hour=problem.budget_per_hour,
        ),
    )


def _yardstick(name: str, plans: Listing, problem: Problem, limit_s: float) -> Yardstick:
    deadline = Deadline(limit_s)
    closest: TooLarge | None = None

    def note_short(found: TooLarge) -> None:
        nonlocal closest
        closest = _closest((closest, found))

    best = best_plan(plans, problem, deadline, note_short=note_short)
    timed_out = deadline.left_something_out or deadline.left_s == 0
    return Yardstick(
        name=name, best=best, timed_out=timed_out, closest=closest, budget_per_hour=problem.budget_per_hour
    )


def _closest(found: Iterable[TooLarge | None]) -> TooLarge | None:
    """The one that lacks least."""
    return min((each for each in found if each is not None), key=lambda each: each.missing_bytes, default=None)
