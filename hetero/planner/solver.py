"""The planner: templates, a cover of the cluster by them, and the best plan of the last round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetero.cost.memory import MemoryParts
from hetero.cost.simulator import Simulation
from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.planner.candidates import Candidates
from hetero.planner.clock import Clock
from hetero.planner.cover import Score
from hetero.planner.finalists import Scored, best_of
from hetero.planner.infeasible import check_devices, check_links, explain
from hetero.planner.money import cheaper_covers
from hetero.planner.problem import Problem
from hetero.planner.rings import Rings
from hetero.planner.search import TOLERANCE, Progress, Search
from hetero.planner.space import TemplateSpace

TEMPLATE_SHARE = 0.5
"""Of the time limit, for enumerating templates; the search has the rest but for the last round's ``FINAL_SHARE``."""

FINAL_SHARE = 0.15

GRADIENT_GROUPS = (3, 8, 24)
"""Sets of ranks with which a device is assumed to sum gradients, until a plan fits the memory model itself."""


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and what is known about it.

    simulation: its predicted step.
    memory: peak parts of one device of every stage, by replica and stage.
    score: the shortest step that the search found, by its own formula; the bound is on this one. The plan may be
        another of its best covers, since the simulator chooses among them.
    bound_s: no cover of the cluster by templates of the space has a shorter step by that formula.
    finished: the search ended by itself and not by its time limit.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryParts]
    score: Score
    bound_s: float
    num_templates: int
    planning_s: float
    finished: bool

    @property
    def gap(self) -> float:
        """By how much, relative to it, the best cover's step may be above the shortest one, by the formula."""
        return max(0.0, 1 - self.bound_s / self.score.step_s)


def plan_cluster(
    problem: Problem, *, report: Callable[[Progress], None] | None = None, tolerance: float = TOLERANCE
) -> PlanResult:
    """The best plan for ``problem`` that is found within its time limit.

    Raises:
        PlanError: no plan fits; the message says what is short by how much, and what would help.
        ConfigError: a device has no profile, or a link is missing.
    """
    clock = Clock(problem.time_limit_s)
    check_links(problem)
    rings = Rings(problem)
    candidates = Candidates(problem)
    check_devices(problem, candidates)
    for num_gradient_groups in GRADIENT_GROUPS:
        candidates = Candidates(problem, num_gradient_groups=num_gradient_groups)
        templates = TemplateSpace(problem, candidates).templates(clock.part(TEMPLATE_SHARE))
        search_clock = clock.part(1 - FINAL_SHARE)
        found = Search(problem, rings, templates, search_clock, tolerance=tolerance, report=report).run()
        covers = found.covers
        if problem.goal == "money":
            covers = cheaper_covers(covers, problem, rings, templates, clock)
        best: Scored | None = best_of((cover for cover, _ in covers), problem, clock)
        if best is not None:
            return PlanResult(
                plan=best.plan,
                simulation=best.simulation,
                memory=best.memory,
                score=found.covers[0][1],
                bound_s=found.bound_s,
                num_templates=len(templates),
                planning_s=clock.elapsed_s,
                finished=found.finished,
            )
        if not templates:
            break
    raise PlanError(explain(problem, candidates, templates))
