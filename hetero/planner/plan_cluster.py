"""The planner: templates, a cover of the cluster by them, and the best plan of the last round."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.cost.memory import MemoryParts
from hetero.cost.simulator import Simulation
from hetero.plan.ir import Plan
from hetero.planner.cover.cheapest import cheaper_covers
from hetero.planner.cover.cover import Cover, CoverScore
from hetero.planner.cover.hill_climbing import HillClimbing
from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.cover.search import FINALISTS, TOLERANCE, Search, SearchProgress
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline
from hetero.planner.improve.gradient_sync import in_domains, synced
from hetero.planner.improve.interleaving import with_interleaving
from hetero.planner.improve.local_search import search_locally
from hetero.planner.improve.split_backward import with_split_backwards
from hetero.planner.initial_plan import first_plan
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import autohet_plans, best_plan, harp_plans
from hetero.planner.replica.feasibility import check_devices, check_links, check_model_fits, nothing_found
from hetero.planner.replica.stage_options import StageOptions
from hetero.planner.replica.template_space import TemplateSpace
from hetero.planner.replica.templates import Template
from hetero.planner.scoring import ScoredPlan, best_levelled, better_of, goal_value, ranked

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
    lower_bound_s: no plan whatever has a shorter step, by formula or simulator.
    finished: the space was enumerated and the search ended by itself, and neither by the time limit.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryParts]
    score: CoverScore | None
    bound_s: float
    lower_bound_s: float = 0.0
    num_templates: int
    planning_s: float
    finished: bool

    @property
    def scored(self) -> ScoredPlan:
        """The plan as yardsticks are shown beside it."""
        return ScoredPlan(plan=self.plan, simulation=self.simulation, memory=self.memory)

    @property
    def gap(self) -> float:
        """By how much, relative to it, the best cover's step may be above the shortest one, by the formula; without a
        cover the plan's own."""
        return max(0.0, 1 - self.bound_s / (self.simulation if self.score is None else self.score).step_s)


def alternating(
    polished: Sequence[tuple[Cover, CoverScore]], found: Sequence[tuple[Cover, CoverScore]]
) -> tuple[tuple[Cover, CoverScore], ...]:
    """The covers of both, one of each in turn: what polishing makes of one cover is alike, and the simulator may
    prefer another."""
    both = dict.fromkeys(itertools.chain.from_iterable(itertools.zip_longest(polished, found)))
    return tuple(each for each in both if each is not None)


def _known_shapes(problem: Problem, stage_options: StageOptions, deadline: Deadline) -> ScoredPlan | None:
    """The best plan of two shapes that published planners make, which the template space may not hold: one replica
    over all nodes with data parallelism across them, and equal replicas of one tp. By the goal of ``problem``."""
    if problem.goal == "money" or problem.budget_per_hour is not None:
        return None
    best: ScoredPlan | None = None
    for plans, share in ((harp_plans(problem, stage_options), 0.6), (autohet_plans(problem, stage_options), 1.0)):
        best = better_of(best, best_plan(plans, problem, deadline.part(share)), problem)
    return best


@dataclass(frozen=True, slots=True)
class _Round:
    """What one search found.

    covers: the best ones, and what polishing made of them.
    finalists: their plans that fit, the best first.
    complete: no limit cut enumeration or search short.
    """

    templates: tuple[Template, ...]
    covers: tuple[tuple[Cover, CoverScore], ...]
    finalists: tuple[ScoredPlan, ...]
    bound_s: float
    complete: bool


def plan_cluster(
    problem: Problem, *, report: Callable[[SearchProgress], None] | None = None, tolerance: float = TOLERANCE
) -> PlanResult:
    """The best plan for ``problem`` that is found within its time limit.

    Raises:
        PlanError: no plan fits, and the message says what is short by how much and what would help; or time ran out
            before there was any plan, of which nobody knows then whether it exists.
        ConfigError: a device has no profile, or a link is missing.
    """
    deadline = Deadline(WITHIN * problem.time_limit_s)
    check_links(problem)
    sync_tiers = SyncTiers(problem)
    stage_options = StageOptions(problem)
    check_devices(problem, stage_options)
    known = first_plan(problem, stage_options, sync_tiers, deadline, share=FIRST_SHARE)
    if known is None:
        check_model_fits(problem)
    known = better_of(known, _known_shapes(problem, stage_options, deadline.part(KNOWN_SHARE)), problem)
    for num_gradient_groups in GRADIENT_GROUPS:
        stage_options = StageOptions(problem, num_gradient_groups=num_gradient_groups)
        found = _search(problem, stage_options, sync_tiers, deadline, report=report, tolerance=tolerance)
        if found.finalists or not found.covers or deadline.is_over():
            break
    last_round = deadline.part(FINALIST_SHARE)
    known = known and in_domains(known, problem, last_round)
    best = better_of(found.finalists[0] if found.finalists else None, known, problem)
    if best is None:
        raise nothing_found(
            problem,
            found.templates,
            complete=found.complete and not deadline.is_over() and not deadline.left_something_out,
        )
    best = _refined(best, found, problem, deadline)
    floor = lower_bound_s(problem, stage_options)
    shortest = min((each for _, each in found.covers), key=lambda each: each.step_s, default=None)
    return PlanResult(
        plan=best.plan,
        simulation=best.simulation,
        memory=best.memory,
        score=shortest,
        bound_s=floor if shortest is None else min(found.bound_s, shortest.step_s),
        lower_bound_s=floor,
        num_templates=len(found.templates),
        planning_s=deadline.elapsed_s,
        finished=found.complete,
    )


def _search(
    problem: Problem,
    stage_options: StageOptions,
    sync_tiers: SyncTiers,
    deadline: Deadline,
    *,
    report: Callable[[SearchProgress], None] | None,
    tolerance: float,
) -> _Round:
    """Templates, the best covers by them, and these covers' plans."""
    space = TemplateSpace(problem, stage_options)
    templates = space.templates(deadline.part(TEMPLATE_SHARE))
    search_deadline = deadline.part(1 - FINAL_SHARE)
    found = Search(problem, sync_tiers, templates, search_deadline, tolerance=tolerance, report=report).run()
    polish = HillClimbing(problem, stage_options, sync_tiers, deadline.part(POLISH_SHARE))
    covers = alternating(polish.polished(found.covers), found.covers)
    if problem.goal == "money":
        covers = cheaper_covers(covers, problem, sync_tiers, templates, deadline)
    last_round = deadline.part(FINALIST_SHARE)
    finish = partial(in_domains, problem=problem, deadline=last_round)
    finalists = ranked((cover for cover, _ in covers[:FINALISTS]), problem, last_round, finish=finish)
    return _Round(
        templates=tuple(templates),
        covers=tuple(covers),
        finalists=tuple(finalists),
        bound_s=found.bound_s,
        complete=space.is_complete and found.finished,
    )


def _refined(best: ScoredPlan, found: _Round, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """``best``, or what several stages per device group, small changes, half layers, split backwards and other gradient
    sums make of it."""
    best = synced(best, problem, deadline)
    best = with_interleaving([best, *found.finalists], problem, deadline.part(INTERLEAVE_SHARE))
    best = search_locally(best, problem, deadline.part(REFINE_SHARE))
    level = best_levelled(found.covers[:FINALISTS], problem, deadline, below_s=best.step_s)
    if level is not None and goal_value(level, problem) < goal_value(best, problem):
        best = search_locally(level, problem, deadline.part(REFINE_SHARE))
    best = with_split_backwards([best, *found.finalists], problem, deadline.part(SPLIT_SHARE))
    return synced(best, problem, deadline)
