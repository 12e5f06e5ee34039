"""The planner: templates, a cover of the cluster by them, and the best plan of the last round."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.cost.memory import MemoryParts
from hetero.cost.simulator import Simulation
from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.planner.baselines import autohet_plans, best_plan, harp_plans
from hetero.planner.candidates import Candidates
from hetero.planner.clock import Clock
from hetero.planner.cover import Cover, Score
from hetero.planner.finalists import Scored, best_levelled, ranked, worth
from hetero.planner.floor import floor_s
from hetero.planner.gradient_sync import in_domains, synced
from hetero.planner.infeasible import check_devices, check_links, explain
from hetero.planner.money import cheaper_covers
from hetero.planner.polish import Polish
from hetero.planner.problem import Problem
from hetero.planner.refine import refined
from hetero.planner.rings import Rings
from hetero.planner.search import FINALISTS, TOLERANCE, Progress, Search
from hetero.planner.space import TemplateSpace
from hetero.planner.split import with_split_backwards

WITHIN = 0.93
"""Of the time limit: a step of the search that has begun is finished first."""

TEMPLATE_SHARE = 0.5
"""Of the time limit, for enumerating templates; the search has the rest but for the last round's ``FINAL_SHARE``."""

FINAL_SHARE = 0.25

FINALIST_SHARE = 0.5
"""Of what is left for the last round; the rest refines the winner."""

REFINE_SHARE = 0.9
"""Of what is left for refining the winner; the rest is for split backwards and for how it sums its gradients."""

SPLIT_SHARE = 0.5
"""Of that rest, for split backwards."""

KNOWN_SHARE = 0.15
"""Of the time limit, for shapes of published planners."""

POLISH_SHARE = 0.4
"""Of what the search leaves, for covers that no template of the space makes."""

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
    floor_s: no plan whatever has a shorter step, by formula or simulator.
    finished: the search ended by itself and not by its time limit.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryParts]
    score: Score
    bound_s: float
    floor_s: float = 0.0
    num_templates: int
    planning_s: float
    finished: bool

    @property
    def scored(self) -> Scored:
        """The plan as yardsticks are shown beside it."""
        return Scored(plan=self.plan, simulation=self.simulation, memory=self.memory)

    @property
    def gap(self) -> float:
        """By how much, relative to it, the best cover's step may be above the shortest one, by the formula."""
        return max(0.0, 1 - self.bound_s / self.score.step_s)


def alternating(
    polished: Sequence[tuple[Cover, Score]], found: Sequence[tuple[Cover, Score]]
) -> tuple[tuple[Cover, Score], ...]:
    """The covers of both, one of each in turn: what polishing makes of one cover is alike, and the simulator may
    prefer another."""
    both = dict.fromkeys(itertools.chain.from_iterable(itertools.zip_longest(polished, found)))
    return tuple(each for each in both if each is not None)


def _known_shapes(problem: Problem, candidates: Candidates, clock: Clock) -> Scored | None:
    """The best plan of two shapes that published planners make, which the template space may not hold: one replica
    over all nodes with data parallelism across them, and equal replicas of one tp. By the goal of ``problem``."""
    if problem.goal == "money" or problem.budget_per_hour is not None:
        return None
    best: Scored | None = None
    for plans, share in ((harp_plans(problem, candidates), 0.6), (autohet_plans(problem, candidates), 1.0)):
        best = _better(best, best_plan(plans, problem, clock.left_s * share), problem)
    return best


def _better(a: Scored | None, b: Scored | None, problem: Problem) -> Scored | None:
    return min((each for each in (a, b) if each is not None), key=lambda each: worth(each, problem), default=None)


def plan_cluster(
    problem: Problem, *, report: Callable[[Progress], None] | None = None, tolerance: float = TOLERANCE
) -> PlanResult:
    """The best plan for ``problem`` that is found within its time limit.

    Raises:
        PlanError: no plan fits; the message says what is short by how much, and what would help.
        ConfigError: a device has no profile, or a link is missing.
    """
    clock = Clock(WITHIN * problem.time_limit_s)
    check_links(problem)
    rings = Rings(problem)
    candidates = Candidates(problem)
    check_devices(problem, candidates)
    known = _known_shapes(problem, candidates, clock.part(KNOWN_SHARE))
    for num_gradient_groups in GRADIENT_GROUPS:
        candidates = Candidates(problem, num_gradient_groups=num_gradient_groups)
        templates = TemplateSpace(problem, candidates).templates(clock.part(TEMPLATE_SHARE))
        search_clock = clock.part(1 - FINAL_SHARE)
        found = Search(problem, rings, templates, search_clock, tolerance=tolerance, report=report).run()
        polish = Polish(problem, candidates, rings, clock.part(POLISH_SHARE))
        covers = alternating(polish.polished(found.covers), found.covers)
        if problem.goal == "money":
            covers = cheaper_covers(covers, problem, rings, templates, clock)
        last_round = clock.part(FINALIST_SHARE)
        finish = partial(in_domains, problem=problem, clock=last_round)
        finalists = ranked((cover for cover, _ in covers[:FINALISTS]), problem, last_round, finish=finish)
        known = known and in_domains(known, problem, last_round)
        best = _better(finalists[0] if finalists else None, known, problem)
        if best is not None:
            best = refined(synced(best, problem, clock), problem, clock.part(REFINE_SHARE))
            level = best_levelled(covers[:FINALISTS], problem, clock, below_s=best.step_s)
            if level is not None and worth(level, problem) < worth(best, problem):
                best = refined(level, problem, clock.part(REFINE_SHARE))
            best = with_split_backwards([best, *finalists], problem, clock.part(SPLIT_SHARE))
            best = synced(best, problem, clock)
            shortest = min((each for _, each in covers), key=lambda each: each.step_s)
            return PlanResult(
                plan=best.plan,
                simulation=best.simulation,
                memory=best.memory,
                score=shortest,
                bound_s=min(found.bound_s, shortest.step_s),
                floor_s=floor_s(problem, candidates),
                num_templates=len(templates),
                planning_s=clock.elapsed_s,
                finished=found.finished,
            )
        if not templates:
            break
    raise PlanError(explain(problem, candidates, templates))
