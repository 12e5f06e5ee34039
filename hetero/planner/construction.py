"""Constructs plans: the first ones, then those of the best covers of the cluster by templates; again with more time.

A construction is asked rung by rung (:mod:`hetero.planner.rungs`), each with more time than the one before. What an
earlier rung was through with is not done again: stage options, templates and climbs are gone on with, and the search
looks only for better covers than it knows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hetero.plan.offload import OnHost
from hetero.planner.cover.cheapest import cheaper_covers
from hetero.planner.cover.cover import Cover, CoverScore
from hetero.planner.cover.expand import expand
from hetero.planner.cover.hill_climbing import HillClimbing
from hetero.planner.cover.search import MOST_COVERS, Search, SearchProgress
from hetero.planner.cover.shortlist import scored_covers
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline, OutOfTime
from hetero.planner.improve.gradient_sync import choose_domains
from hetero.planner.initial_plan import InitialPlans, initial_plans, published_residency, published_shape
from hetero.planner.problem import Problem
from hetero.planner.replica.feasibility import check_devices, check_model_fits, nothing_found
from hetero.planner.replica.least_memory import FITTING_S
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.replica.template_space import TemplateSpace
from hetero.planner.replica.templates import Template
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

EARLY_RUNGS = 3
"""Better covers are found in these, most of all. A heuristic."""

ProgressReport = Callable[[SearchProgress], None]

ScoredCovers = tuple[tuple[Cover, CoverScore], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """What templates, search and simulator found.

    covers: the best ones, and what hill climbing made of them.
    plans: those of the covers that fit, the best first.
    bound_s: no cover by the templates has a shorter step.
    complete: no limit cut enumeration or search short.
    """

    templates: tuple[Template, ...] = ()
    covers: ScoredCovers = ()
    plans: tuple[ScoredPlan, ...] = ()
    bound_s: float = 0.0
    complete: bool = False

    def beside(self, other: "Found", problem: Problem) -> "Found":
        """With the covers and plans of ``other`` as well, which looked at some node types only; what was proven stays,
        since they are covers of the whole cluster."""
        plans = sorted((*self.plans, *other.plans), key=lambda each: goal_value(each, problem))
        return dataclasses.replace(self, covers=alternating(self.covers, other.covers), plans=tuple(plans))

    def estimated(self, problem: Problem) -> tuple[EstimatedPlan, ...]:
        """The plans of the best covers with the steps that the formula gives them."""
        return tuple(
            EstimatedPlan(score.step_s, partial(expand, cover, problem)) for cover, score in self.covers[:MOST_COVERS]
        )


class Covers:
    """Templates by one table of stage options, the best covers by them, and these covers' plans."""

    def __init__(
        self, problem: Problem, stage_options: StageOptionTable, sync_tiers: SyncTiers, *, tolerance: float
    ) -> None:
        self._problem = problem
        self._sync_tiers = sync_tiers
        self._tolerance = tolerance
        self._space = TemplateSpace(problem, stage_options)
        self._climbing = HillClimbing(problem, stage_options, sync_tiers)
        self._searched: ScoredCovers = ()
        self._looked_at: set[Cover] = set()
        self.found = Found()
        self.is_through = False

    def go_on(self, deadline: Deadline, report: ProgressReport | None = None) -> Found:
        """Search on with more time. If the end of all planning interrupts the search, what was found before stays."""
        if self.is_through:
            return self.found
        problem, step = self._problem, deadline.part(1.0)
        # The best cover is of no use if there is no time left to make a plan of it and to look at that.
        searching = step.leaving(STAGE_S * problem.cluster.num_devices)
        templates = self._space.templates(TimeShare.TEMPLATES.of(searching))
        search = Search(
            problem,
            self._sync_tiers,
            templates,
            TimeShare.SEARCH.of(searching),
            known=self._searched,
            tolerance=self._tolerance,
            report=report,
        )
        searched = search.run()
        if searching.is_interrupted and self.found.templates:
            return self.found
        self._searched = searched.covers
        climbed = self._climbing.climb(searched.covers, TimeShare.HILL_CLIMBING.of(searching))
        covers = alternating(climbed, searched.covers)
        if problem.goal == "money":
            covers = cheaper_covers(covers, problem, self._sync_tiers, templates, step)
        self.found = Found(
            templates=tuple(templates),
            covers=covers,
            plans=self._plans(covers, TimeShare.SHORTLIST.of(step)),
            bound_s=searched.bound_s,
            complete=self._space.is_complete and searched.finished,
        )
        self.is_through = not step.ran_out
        return self.found

    def _plans(self, covers: ScoredCovers, deadline: Deadline) -> tuple[ScoredPlan, ...]:
        """The plans of the best covers, and of those of before."""
        finish = partial(choose_domains, problem=self._problem, deadline=deadline)
        best = [cover for cover, _ in covers[:MOST_COVERS]]
        new = scored_covers(
            (cover for cover in best if cover not in self._looked_at), self._problem, deadline, finish=finish
        )
        if not deadline.ran_out:
            self._looked_at.update(best)
        plans = {each.plan: each for each in (*self.found.plans, *new)}
        return tuple(sorted(plans.values(), key=lambda each: goal_value(each, self._problem)))


class Construction:
    """The plans of one problem before any of them is improved, and what is kept to find more of them.

    Args:
        known: plans that were found before; they count as found.
        report: is told what the search knows.

    Raises:
        PlanError: no device has the precision, or computes in fp8 if that is asked for.
        ConfigError: a device has no profile.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        tolerance: float,
        known: Sequence[ScoredPlan] = (),
        report: ProgressReport | None = None,
    ) -> None:
        self._problem = problem
        self._known = known
        self._tolerance = tolerance
        self._report = report
        self._sync_tiers = SyncTiers(problem)
        self._stage_options = StageOptionTable(problem)
        check_devices(problem, self._stage_options)
        self._covers: dict[tuple[int, OnHost, frozenset[int] | None], Covers] = {}
        self._fits = self._has_every_initial = False
        self._rungs = 0
        self._has_domains: ScoredPlan | None = None
        self.first = InitialPlans(None, None)
        self.published: ScoredPlan | None = None
        self.initial: ScoredPlan | None = None
        self.found = Found()
        self.is_through = False

    @property
    def plans(self) -> tuple[ScoredPlan, ...]:
        """All that there are, the best first."""
        every = (*self.found.plans, *([] if self.initial is None else [self.initial]), *self._known)
        return tuple(sorted(every, key=lambda each: goal_value(each, self._problem)))

    def go_on(self, rung: Deadline) -> Shortlist | None:
        """Construct in the time of this rung.

        Returns:
            The plans to improve; ``None`` if there is none yet.

        Raises:
            PlanError: no plan fits, and the message says what is short by how much and what would help.
        """
        self._rungs += 1
        if not self.is_through:
            step = rung.part(1.0)
            try:
                self._make_initial_plans(step)
            except OutOfTime:
                return None
            self._find_covers(step)
            self._choose_initial_domains(step)
            self.is_through = not step.ran_out
            if not self.plans and self.found.complete and not step.is_over() and not step.left_something_out:
                raise nothing_found(self._problem, self.found.templates, complete=True)
        return Shortlist(self.plans[0], self.found.plans, self.found.estimated(self._problem)) if self.plans else None

    def _make_initial_plans(self, rung: Deadline) -> None:
        """Whole replicas, uniform plans, the shapes of two published planners, and what others leave to hosts.

        Raises:
            OutOfTime: nobody knows yet whether anything fits.
        """
        if self._has_every_initial:
            return
        problem, options, step = self._problem, self._stage_options, rung.part(1.0)
        enough = TimeShare.INITIAL_PLAN.of(step)
        first = initial_plans(problem, options, self._sync_tiers, step, enough=enough)
        best = better_of(self.first.best, first.best, problem)
        self.first = InitialPlans(best, better_of(self.first.uniform, first.uniform, problem))
        if best is None and not self._fits:
            check_model_fits(problem, step.at_least(FITTING_S))
            self._fits = True
        shapes = TimeShare.PUBLISHED_SHAPES.of(step)
        self.published = better_of(self.published, published_shape(problem, options, shapes, beside=best), problem)
        initial = better_of(best, self.published, problem)
        residency = published_residency(problem, TimeShare.PUBLISHED_RESIDENCY.of(step), beside=initial)
        self.initial = better_of(self.initial, better_of(initial, residency, problem), problem)
        self._has_every_initial = not step.ran_out

    def _find_covers(self, rung: Deadline) -> None:
        """Plans of the best covers of the cluster, and of what the best one of these keeps if node types idle."""
        problem, hosts = self._problem, left_to_hosts(self.initial, self._problem)
        for num_gradient_groups in GRADIENT_GROUPS:
            # As long as there is nothing to improve, all of the time is for finding a plan.
            covers = self._covers_by(num_gradient_groups, hosts)
            is_later = self._rungs > EARLY_RUNGS and covers.found.plans
            share = TimeShare.LATER_COVERS if is_later else TimeShare.COVERS
            covering = rung if self.initial is None else share.of(rung)
            self.found = covers.go_on(covering, self._report)
            if self.found.plans or not self.found.covers or rung.is_over():
                break
        kept = _kept_node_types(self.plans[0] if self.plans else None, problem)
        if problem.goal == "time" and 0 < len(kept) < len(self._stage_options.usable_node_types):
            share = TimeShare.LATER_KEPT_NODE_TYPES if is_later else TimeShare.KEPT_NODE_TYPES
            without = self._covers_by(num_gradient_groups, hosts, only=kept).go_on(share.of(rung))
            self.found = self.found.beside(without, problem)

    def _covers_by(self, num_gradient_groups: int, hosts: OnHost, only: frozenset[int] | None = None) -> Covers:
        """The covers with such stage options, as far as they were searched."""
        key = num_gradient_groups, hosts, only
        if key not in self._covers:
            options = StageOptionTable(self._problem, num_gradient_groups=num_gradient_groups, hosts=hosts, only=only)
            self._covers[key] = Covers(self._problem, options, self._sync_tiers, tolerance=self._tolerance)
        return self._covers[key]

    def _choose_initial_domains(self, rung: Deadline) -> None:
        """Domains for the gradient sums of the initial plan; plans of covers have theirs by now."""
        if self.initial is not None and self.initial is not self._has_domains:
            step = TimeShare.INITIAL_DOMAINS.of(rung)
            self.initial = choose_domains(self.initial, self._problem, step)
            self._has_domains = None if step.ran_out else self.initial


def alternating(climbed: Sequence[tuple[Cover, CoverScore]], found: ScoredCovers) -> ScoredCovers:
    """The covers of both, one of each in turn: what hill climbing makes of one cover is alike, and the simulator may
    prefer another."""
    both = dict.fromkeys(itertools.chain.from_iterable(itertools.zip_longest(climbed, found)))
    return tuple(each for each in both if each is not None)


def _kept_node_types(best: ScoredPlan | None, problem: Problem) -> frozenset[int]:
    """The node types that work in ``best``, by their indices; none without a plan."""
    working = {stage.ranks[0] for _, _, stage in best.plan.stages()} if best is not None else ()
    return frozenset(problem.node_type_of(rank).index for rank in working)
