"""Plans a cluster: stage options, replica templates, a cover of the cluster by them, and passes over the best plans."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.cost.simulation.simulator import Simulation
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.ir import Plan
from hetero.planner.certainty import RunnerUp
from hetero.planner.cover.cheapest import cheaper_covers
from hetero.planner.cover.cover import Cover, CoverScore
from hetero.planner.cover.expand import expand
from hetero.planner.cover.hill_climbing import HillClimbing
from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.cover.search import MOST_COVERS, TOLERANCE, Search, SearchProgress
from hetero.planner.cover.shortlist import scored_covers
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline, OutOfTime
from hetero.planner.improve.gradient_sync import choose_domains
from hetero.planner.improve.passes import improved
from hetero.planner.initial_plan import initial_plans, published_residency, published_shape
from hetero.planner.problem import Problem
from hetero.planner.replica.feasibility import check_devices, check_links, check_model_fits, nothing_found
from hetero.planner.replica.least_memory import FITTING_S
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.replica.template_space import TemplateSpace
from hetero.planner.replica.templates import Template
from hetero.planner.ring_interfaces import RingsWithOneInterface, good_with_either
from hetero.planner.scoring import (
    STAGE_S,
    EstimatedPlan,
    ScoredPlan,
    Shortlist,
    better_of,
    goal_value,
    left_to_hosts,
)
from hetero.planner.time_shares import TimeShare

GRADIENT_GROUPS = (3, 8, 24)
"""Sets of ranks with which a device is assumed to sum gradients: one number after the other, until a plan fits the
memory model itself. A heuristic."""

KEPT_SHARE = 0.3
"""Of the time that is left after the search, where the best plan leaves node types idle: another search among those
that it keeps, whose template space is finer, as there are fewer of them. A heuristic."""

ProgressReport = Callable[[SearchProgress], None]


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and what is known about it.

    simulation: its predicted step.
    memory: peak parts of one device of every stage, by replica and stage.
    score: the shortest step that the search found, by its own formula; the bound is on this one. The plan may be
        another of its best covers, since the simulator chooses among them. ``None`` if time ran out before there was a
        cover: the plan is then one of those that are made first.
    bound_s: no cover of the cluster by templates of the space has a shorter step by that formula.
    lower_bound_s: no plan whatever has a shorter step by the simulator.
    finished: the space was enumerated and the search ended by itself, and neither by the time limit.
    runners_up: the best of the other plans that were looked at, by what they are.
    rings: what the step is if a ring has one interface of each node; ``None`` where that is no question, or was not
        looked at.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryBreakdown]
    score: CoverScore | None
    bound_s: float
    lower_bound_s: float = 0.0
    num_templates: int
    planning_s: float
    finished: bool
    runners_up: tuple[RunnerUp, ...] = ()
    rings: RingsWithOneInterface | None = None

    @property
    def scored(self) -> ScoredPlan:
        """The plan as yardsticks are shown beside it."""
        return ScoredPlan(plan=self.plan, simulation=self.simulation, memory=self.memory)

    @property
    def gap(self) -> float:
        """By how much at most the best cover's step is above the shortest one, relative to it and by the formula;
        without a cover the plan's own step."""
        return max(0.0, 1 - self.bound_s / (self.simulation if self.score is None else self.score).step_s)

    @property
    def gap_to_any(self) -> float:
        """The part of the plan's step by which another plan could be shorter at most, by the simulator."""
        return max(0.0, 1 - self.lower_bound_s / self.simulation.step_s)


def plan_cluster(
    problem: Problem,
    *,
    report: ProgressReport | None = None,
    tolerance: float = TOLERANCE,
    deadline: Deadline | None = None,
) -> PlanResult:
    """Find the best plan for ``problem`` within its time limit.

    tolerance: relative; covers that are better by less are not looked for.
    deadline: in place of the problem's time limit, such as one that counts work instead of seconds.

    Raises:
        PlanError: no plan fits, and the message says what is short by how much and what would help; or time ran out
            before there was any plan, of which nobody knows then whether it exists.
        ConfigError: a device has no profile, or a link is missing.
    """
    deadline = deadline or TimeShare.PLANNING.of_seconds(problem.time_limit_s)
    check_links(problem)
    sync_tiers = SyncTiers(problem)
    stage_options = StageOptionTable(problem)
    check_devices(problem, stage_options)
    try:
        first = initial_plans(problem, stage_options, sync_tiers, deadline, enough=TimeShare.INITIAL_PLAN.of(deadline))
        if first.best is None:
            check_model_fits(problem, deadline.at_least(FITTING_S))
    except OutOfTime:
        raise nothing_found(problem, (), complete=False) from None
    shapes = TimeShare.PUBLISHED_SHAPES.of(deadline)
    published = published_shape(problem, stage_options, shapes, beside=first.best)
    initial = better_of(first.best, published, problem)
    hosts = left_to_hosts(initial, problem)
    residency = published_residency(problem, TimeShare.PUBLISHED_RESIDENCY.of(deadline), beside=initial)
    initial = better_of(initial, residency, problem)
    for num_gradient_groups in GRADIENT_GROUPS:
        stage_options = StageOptionTable(problem, num_gradient_groups=num_gradient_groups, hosts=hosts)
        # As long as there is nothing to improve, all of the time is for finding a plan.
        covering = deadline if initial is None else TimeShare.COVERS.of(deadline)
        found = _search(problem, stage_options, sync_tiers, covering, report=report, tolerance=tolerance)
        if found.plans or not found.covers or deadline.is_over():
            break
    kept = _kept_node_types(better_of(found.plans[0] if found.plans else None, initial, problem), problem)
    if problem.goal == "time" and 0 < len(kept) < len(stage_options.usable_node_types):
        kept_options = StageOptionTable(problem, num_gradient_groups=num_gradient_groups, hosts=hosts, only=kept)
        keeping = deadline.part(KEPT_SHARE)
        without = _search(problem, kept_options, sync_tiers, keeping, report=None, tolerance=tolerance)
        found = found.beside(without, problem)
    if initial is not None:  # Plans of covers have their domains by now.
        initial = choose_domains(initial, problem, TimeShare.INITIAL_DOMAINS.of(deadline))
    best = better_of(found.plans[0] if found.plans else None, initial, problem)
    if best is None:
        in_time = not deadline.is_over() and not deadline.left_something_out
        raise nothing_found(problem, found.templates, complete=found.complete and in_time)
    improving = deadline.part(1 - TimeShare.RINGS.share) if problem.cluster.leaves_rings_open else deadline
    best = improved(Shortlist(best, found.plans, found.estimated(problem)), problem, improving)
    best, rings = good_with_either(best, found.plans, problem, deadline)
    others = {
        "the next best plan of other stages": (*found.plans, initial, published),
        "a uniform plan": (first.uniform,),
    }
    result = _result(best, found, _runners_up(best, others, problem), lower_bound_s(problem), deadline)
    return dataclasses.replace(result, rings=rings)


@dataclass(frozen=True, slots=True)
class _Found:
    """What templates, search and simulator found.

    covers: the best ones, and what hill climbing made of them.
    plans: those of the covers that fit, the best first.
    complete: no limit cut enumeration or search short.
    """

    templates: tuple[Template, ...]
    covers: tuple[tuple[Cover, CoverScore], ...]
    plans: tuple[ScoredPlan, ...]
    bound_s: float
    complete: bool

    def beside(self, other: "_Found", problem: Problem) -> "_Found":
        """With the covers and plans of ``other`` as well, which looked at some node types only; what was proven stays,
        since they are covers of the whole cluster."""
        plans = sorted((*self.plans, *other.plans), key=lambda each: goal_value(each, problem))
        return dataclasses.replace(self, covers=alternating(self.covers, other.covers), plans=tuple(plans))

    def estimated(self, problem: Problem) -> tuple[EstimatedPlan, ...]:
        """The plans of the best covers with the steps that the formula gives them."""
        return tuple(
            EstimatedPlan(score.step_s, partial(expand, cover, problem)) for cover, score in self.covers[:MOST_COVERS]
        )


def _search(
    problem: Problem,
    stage_options: StageOptionTable,
    sync_tiers: SyncTiers,
    deadline: Deadline,
    *,
    report: ProgressReport | None,
    tolerance: float,
) -> _Found:
    """Templates, the best covers by them, and these covers' plans."""
    # The best cover is of no use if there is no time left to make a plan of it and to look at that.
    searching = deadline.leaving(STAGE_S * problem.cluster.num_devices)
    space = TemplateSpace(problem, stage_options)
    templates = space.templates(TimeShare.TEMPLATES.of(searching))
    search = Search(problem, sync_tiers, templates, TimeShare.SEARCH.of(searching), tolerance=tolerance, report=report)
    found = search.run()
    climbing = HillClimbing(problem, stage_options, sync_tiers, TimeShare.HILL_CLIMBING.of(searching))
    covers = alternating(climbing.climb(found.covers), found.covers)
    if problem.goal == "money":
        covers = cheaper_covers(covers, problem, sync_tiers, templates, deadline)
    simulating = TimeShare.SHORTLIST.of(deadline)
    finish = partial(choose_domains, problem=problem, deadline=simulating)
    plans = scored_covers((cover for cover, _ in covers[:MOST_COVERS]), problem, simulating, finish=finish)
    return _Found(
        templates=tuple(templates),
        covers=covers,
        plans=tuple(plans),
        bound_s=found.bound_s,
        complete=space.is_complete and found.finished,
    )


def alternating(
    climbed: Sequence[tuple[Cover, CoverScore]], found: Sequence[tuple[Cover, CoverScore]]
) -> tuple[tuple[Cover, CoverScore], ...]:
    """The covers of both, one of each in turn: what hill climbing makes of one cover is alike, and the simulator may
    prefer another."""
    both = dict.fromkeys(itertools.chain.from_iterable(itertools.zip_longest(climbed, found)))
    return tuple(each for each in both if each is not None)


def _kept_node_types(best: ScoredPlan | None, problem: Problem) -> frozenset[int]:
    """The node types that work in ``best``, by their indices; none without a plan."""
    working = {stage.ranks[0] for _, _, stage in best.plan.stages()} if best is not None else ()
    return frozenset(problem.node_type_of(rank).index for rank in working)


def _runners_up(
    best: ScoredPlan, others: Mapping[str, Sequence[ScoredPlan | None]], problem: Problem
) -> tuple[RunnerUp, ...]:
    """Of each list the best plan that is another one than ``best``: by its devices and degrees, and not by a layer."""
    found = []
    for name, plans in others.items():
        unlike = [each for each in plans if each is not None and _stages_of(each.plan) != _stages_of(best.plan)]
        if unlike:
            other = min(unlike, key=lambda each: goal_value(each, problem))
            found.append(RunnerUp(name, other.simulation, goal_value(other, problem) / goal_value(best, problem)))
    return tuple(found)


def _stages_of(plan: Plan) -> Counter[tuple[tuple[str, int, int], ...]]:
    """The replicas by what their stages are made of: device, tp and dp."""
    return Counter(tuple((stage.device, stage.tp, stage.dp) for stage in replica.stages) for replica in plan.replicas)


def _result(
    best: ScoredPlan, found: _Found, runners_up: tuple[RunnerUp, ...], lower_bound_s: float, deadline: Deadline
) -> PlanResult:
    shortest = min((each for _, each in found.covers), key=lambda each: each.step_s, default=None)
    return PlanResult(
        plan=best.plan,
        simulation=best.simulation,
        memory=best.memory,
        score=shortest,
        bound_s=lower_bound_s if shortest is None else min(found.bound_s, shortest.step_s),
        lower_bound_s=lower_bound_s,
        num_templates=len(found.templates),
        planning_s=deadline.elapsed_s,
        finished=found.complete,
        runners_up=runners_up,
    )
