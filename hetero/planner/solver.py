"""The planner: templates, a cover of the cluster by them, and the best plan of the last round."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.cost.simulation.simulator import Simulation
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.ir import Plan
from hetero.planner.baselines import autohet_plans, best_plan, harp_plans
from hetero.planner.candidates import Candidates
from hetero.planner.clock import Clock
from hetero.planner.cover import Cover, Score
from hetero.planner.finalists import Scored, best_levelled, better, ranked, worth
from hetero.planner.first import first_plan
from hetero.planner.floor import floor_s
from hetero.planner.gradient_sync import in_domains, synced
from hetero.planner.infeasible import check_devices, check_links, check_model_fits, nothing_found
from hetero.planner.interleave import with_interleaving
from hetero.planner.money import cheaper_covers
from hetero.planner.polish import Polish
from hetero.planner.problem import Problem
from hetero.planner.refine import refined
from hetero.planner.rings import Rings
from hetero.planner.search import FINALISTS, TOLERANCE, Progress, Search
from hetero.planner.space import TemplateSpace
from hetero.planner.split import with_split_backwards
from hetero.planner.templates import Template

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

INTERLEAVE_SHARE = 0.15
"""Of what is left for refining the winner, for several stages per device group before that."""

FIRST_SHARE = 0.08
"""Of the time limit, after which a first plan that was found is enough."""

KNOWN_SHARE = 0.12
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
        another of its best covers, since the simulator chooses among them. ``None`` if time ran out before there was a
        cover: the plan is then one of those that are made first.
    bound_s: no cover of the cluster by templates of the space has a shorter step by that formula.
    floor_s: no plan whatever has a shorter step, by formula or simulator.
    finished: the space was enumerated and the search ended by itself, and neither by the time limit.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryBreakdown]
    score: Score | None
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
        """By how much, relative to it, the best cover's step may be above the shortest one, by the formula; without a
        cover the plan's own."""
        return max(0.0, 1 - self.bound_s / (self.simulation if self.score is None else self.score).step_s)


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
        best = better(best, best_plan(plans, problem, clock.part(share)), problem)
    return best


@dataclass(frozen=True, slots=True)
class _Round:
    """What one search found.

    covers: the best ones, and what polishing made of them.
    finalists: their plans that fit, the best first.
    complete: no limit cut enumeration or search short.
    """

    templates: tuple[Template, ...]
    covers: tuple[tuple[Cover, Score], ...]
    finalists: tuple[Scored, ...]
    bound_s: float
    complete: bool


def plan_cluster(
    problem: Problem, *, report: Callable[[Progress], None] | None = None, tolerance: float = TOLERANCE
) -> PlanResult:
    """The best plan for ``problem`` that is found within its time limit.

    Raises:
        PlanError: no plan fits, and the message says what is short by how much and what would help; or time ran out
            before there was any plan, of which nobody knows then whether it exists.
        ConfigError: a device has no profile, or a link is missing.
    """
    clock = Clock(WITHIN * problem.time_limit_s)
    check_links(problem)
    rings = Rings(problem)
    candidates = Candidates(problem)
    check_devices(problem, candidates)
    known = first_plan(problem, candidates, rings, clock, share=FIRST_SHARE)
    if known is None:
        check_model_fits(problem)
    known = better(known, _known_shapes(problem, candidates, clock.part(KNOWN_SHARE)), problem)
    for num_gradient_groups in GRADIENT_GROUPS:
        candidates = Candidates(problem, num_gradient_groups=num_gradient_groups)
        found = _search(problem, candidates, rings, clock, report=report, tolerance=tolerance)
        if found.finalists or not found.covers or clock.is_over():
            break
    last_round = clock.part(FINALIST_SHARE)
    known = known and in_domains(known, problem, last_round)
    best = better(found.finalists[0] if found.finalists else None, known, problem)
    if best is None:
        raise nothing_found(
            problem, found.templates, complete=found.complete and not clock.is_over() and not clock.left_something_out
        )
    best = _refined(best, found, problem, clock)
    floor = floor_s(problem, candidates)
    shortest = min((each for _, each in found.covers), key=lambda each: each.step_s, default=None)
    return PlanResult(
        plan=best.plan,
        simulation=best.simulation,
        memory=best.memory,
        score=shortest,
        bound_s=floor if shortest is None else min(found.bound_s, shortest.step_s),
        floor_s=floor,
        num_templates=len(found.templates),
        planning_s=clock.elapsed_s,
        finished=found.complete,
    )


def _search(
    problem: Problem,
    candidates: Candidates,
    rings: Rings,
    clock: Clock,
    *,
    report: Callable[[Progress], None] | None,
    tolerance: float,
) -> _Round:
    """Templates, the best covers by them, and these covers' plans."""
    space = TemplateSpace(problem, candidates)
    templates = space.templates(clock.part(TEMPLATE_SHARE))
    search_clock = clock.part(1 - FINAL_SHARE)
    found = Search(problem, rings, templates, search_clock, tolerance=tolerance, report=report).run()
    polish = Polish(problem, candidates, rings, clock.part(POLISH_SHARE))
    covers = alternating(polish.polished(found.covers), found.covers)
    if problem.goal == "money":
        covers = cheaper_covers(covers, problem, rings, templates, clock)
    last_round = clock.part(FINALIST_SHARE)
    finish = partial(in_domains, problem=problem, clock=last_round)
    finalists = ranked((cover for cover, _ in covers[:FINALISTS]), problem, last_round, finish=finish)
    return _Round(
        templates=tuple(templates),
        covers=tuple(covers),
        finalists=tuple(finalists),
        bound_s=found.bound_s,
        complete=space.is_complete and found.finished,
    )


def _refined(best: Scored, found: _Round, problem: Problem, clock: Clock) -> Scored:
    """``best``, or what several stages per device group, small changes, half layers, split backwards and other gradient
    sums make of it."""
    best = synced(best, problem, clock)
    best = with_interleaving([best, *found.finalists], problem, clock.part(INTERLEAVE_SHARE))
    best = refined(best, problem, clock.part(REFINE_SHARE))
    level = best_levelled(found.covers[:FINALISTS], problem, clock, below_s=best.step_s)
    if level is not None and worth(level, problem) < worth(best, problem):
        best = refined(level, problem, clock.part(REFINE_SHARE))
    best = with_split_backwards([best, *found.finalists], problem, clock.part(SPLIT_SHARE))
    return synced(best, problem, clock)
