"""Makes an initial plan in a moment, so that there is one to return whenever time runs out later.

Whole replicas come first: of each node type the fastest small pipeline that holds the model, as many copies as there is
room for, on one node type or on all of them with the samples shared out by speed. Where no node type holds the model
alone, the pipeline that needs the least memory (:mod:`hetero.planner.replica.least_memory`) is a plan, if there is any.
The uniform plans of Megatron's flags follow. All of these are heuristics.

Two shapes of published planners, which the template space may not hold, are looked at as well; and where memory is
short, what published systems leave to hosts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.plan.ir import Plan
from hetero.plan.offload import OnHost
from hetero.planner.cover.cover import Copies, Cover, CoverScore, divide_batch, score_cover
from hetero.planner.cover.expand import expand
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline
from hetero.planner.listed.grid_plans import every_uniform
from hetero.planner.listed.listed_plans import best_plan
from hetero.planner.listed.offload_policies import POLICIES
from hetero.planner.listed.published_planners import autohet_plans, harp_plans
from hetero.planner.problem import Problem
from hetero.planner.replica.least_memory import FITTING_S, LeastMemoryPipeline
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.replica.template_space import TemplateSpace
from hetero.planner.replica.templates import Template, milli_price
from hetero.planner.scoring import STAGE_S, ScoredPlan, better_of, is_within_budget, memory_is_short, score_if_legal
from hetero.planner.time_shares import TimeShare

SCORED_SHARE = 0.75
"""Of the time for the first plan, what looking at its stages may take by estimate: of a very large cluster a part is
planned in time instead of nothing. A heuristic."""

MOST_SCORED = 4
"""Covers by whole replicas that are simulated, the best by the formula first. A heuristic."""


@dataclass(frozen=True, slots=True)
class InitialPlans:
    """The best plan of those that are quick to make, and the best uniform one; ``None`` where none was found."""

    best: ScoredPlan | None
    uniform: ScoredPlan | None


def initial_plans(
    problem: Problem,
    stage_options: StageOptionTable,
    sync_tiers: SyncTiers,
    deadline: Deadline,
    *,
    enough: Deadline,
) -> InitialPlans:
    """Make the plans that are quick to make; there is none if none fits, or ``deadline`` is over before one is found.

    enough: when it is over, a plan that was found is enough.
    """
    best: ScoredPlan | None = None
    uniform: ScoredPlan | None = None
    longest = TimeShare.FIRST_PIPELINE.of(deadline)
    templates_enough = TimeShare.INITIAL_TEMPLATES.of(enough)
    for plan in _by_whole_replicas(problem, stage_options, sync_tiers, longest, templates_enough):
        if best is not None and enough.is_over():
            break
        best = better_of(best, _score_within_budget(plan, problem, deadline), problem)
    for hosts in OnHost:
        if best is None and hosts <= problem.most_on_host:
            table = StageOptionTable(problem, num_gradient_groups=0, hosts=hosts)
            smallest = LeastMemoryPipeline(problem, table, deadline.at_least(FITTING_S)).plan()
            best = _score_within_budget(smallest, problem, deadline) if smallest is not None else None
    if problem.goal == "time" and problem.budget_per_hour is None:
        uniform = best_plan(
            itertools.chain.from_iterable(every_uniform(problem, stage_options).values()),
            problem,
            TimeShare.INITIAL_PLAN.of(deadline),
            beside=best,
        )
        best = better_of(best, uniform, problem)
    return InitialPlans(best, uniform)


def published_shape(
    problem: Problem, stage_options: StageOptionTable, deadline: Deadline, *, beside: ScoredPlan | None = None
) -> ScoredPlan | None:
    """The best plan of two shapes that published planners make: one replica over all nodes with data parallelism across
    them (HARP), and equal replicas of one tp (AutoHet).

    Args:
        beside: a plan that there is already.

    Returns:
        ``None`` if none fits, or if the problem is about money, which neither planner knows.
    """
    if problem.goal == "money" or problem.budget_per_hour is not None:
        return None
    harp = best_plan(harp_plans(problem, stage_options), problem, TimeShare.HARP.of(deadline), beside=beside)
    beside = better_of(harp, beside, problem)
    autohet = best_plan(autohet_plans(problem, stage_options), problem, deadline.part(1.0), beside=beside)
    return better_of(harp, autohet, problem)


def published_residency(problem: Problem, deadline: Deadline, *, beside: ScoredPlan | None) -> ScoredPlan | None:
    """The best plan by the rules of systems that train beside a host's memory.

    Args:
        beside: the best plan that there is already.

    Returns:
        ``None`` if none fits, if hosts are not asked, or if the problem is about money, which none of them knows.
    """
    if problem.goal == "money" or problem.budget_per_hour is not None:
        return None
    if not (problem.offloads and memory_is_short(beside)):
        return None
    best: ScoredPlan | None = None
    for left, policy in zip(range(len(POLICIES), 0, -1), POLICIES.values(), strict=True):
        found = best_plan(policy(problem), problem, deadline.part(1 / left), beside=beside)
        best = better_of(best, found, problem)
    return best


def _score_within_budget(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """Score a plan within the budget; ``None`` if it does not fit or cannot be made."""
    return score_if_legal(plan, problem, deadline) if is_within_budget(plan, problem) else None


def _by_whole_replicas(
    problem: Problem, stage_options: StageOptionTable, sync_tiers: SyncTiers, deadline: Deadline, enough: Deadline
) -> Iterator[Plan]:
    """Plans of the best covers, by the formula."""
    fastest: dict[int, dict[int, Template]] = {}
    for template in TemplateSpace(problem, stage_options).of_one_node_type():
        if deadline.is_over():
            break
        if template is None:
            continue
        (node_type,) = (k for k, n in enumerate(template.devices) if n)
        of_samples = fastest.setdefault(template.samples, {})
        if node_type not in of_samples or _rate_per_device(template) > _rate_per_device(of_samples[node_type]):
            of_samples[node_type] = template
        if enough.is_over():
            break
    covers: dict[Cover, CoverScore] = {}
    most_stages = int(SCORED_SHARE * (deadline.whole or deadline).left_s / STAGE_S)
    for templates in fastest.values():
        alone = [[template] for template in templates.values()]
        for chosen in (list(templates.values()), *alone):
            if (cover := _cover(chosen, problem, most_stages)) is not None:
                covers[cover] = score_cover(cover, problem, sync_tiers)
    by_goal = sorted(covers.items(), key=lambda item: item[1].goal_order(problem.goal))
    for cover, _ in by_goal[:MOST_SCORED]:
        yield expand(cover, problem)


def _rate_per_device(template: Template) -> float:
    """Samples per second and device."""
    return template.rate / sum(template.devices)


def _cover(templates: Sequence[Template], problem: Problem, most_stages: int) -> Cover | None:
    """As many copies of each as there is room, samples and money for, and time to look at so many stages; ``None`` if
    samples do not divide."""
    batch = problem.global_batch_size
    most_copies = [_most_copies(template, problem) for template in templates]
    stages = sum(most * len(template.stages) for most, template in zip(most_copies, templates, strict=True))
    if stages > most_stages:
        most_copies = [max(1, most * most_stages // stages) for most in most_copies]
    rate = sum(most * template.rate for most, template in zip(most_copies, templates, strict=True))
    copies = []
    for template, room in zip(templates, most_copies, strict=True):
        # A replica has a microbatch at least, and of those a part that is its speed's.
        most = int(batch // template.samples * room * template.rate / rate)
        copies.append((template, max(1, min(room, most))))
    if len(copies) == 1:
        ((template, number),) = copies
        microbatches, rest = divmod(batch, template.samples)
        return None if rest or microbatches < number else (Copies(template, number, microbatches),)
    longest_s = max(template.seconds(-(-batch // template.samples)) for template in templates)
    return divide_batch(copies, batch, longest_s)


def _most_copies(template: Template, problem: Problem) -> int:
    """As many copies as there is room and money for, one at least."""
    most, price = template.most_copies(problem.node_types), milli_price(template, problem)
    if most * price > problem.milli_budget:
        most = int(problem.milli_budget // price)
    return max(1, most)
