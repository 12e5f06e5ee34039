"""The first plan: made in a moment, so that there is one to return whatever time runs out later.

Whole replicas come first: of each kind of node the fastest small pipeline that holds the model, as many copies as
there is room for, on one kind or on all of them with the samples shared out by speed. Where no kind holds the model
alone, the pipeline that needs the least memory (:mod:`hetero.planner.thriftiest`) is a plan, if there is any. The
uniform plans of Megatron's flags follow.
"""

import itertools
from collections.abc import Iterator, Sequence

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.baselines import best_plan, every_uniform
from hetero.planner.candidates import Candidates
from hetero.planner.clock import Clock
from hetero.planner.constraints import milli_price
from hetero.planner.cover import Copies, Cover, Score, score
from hetero.planner.expand import expand
from hetero.planner.finalists import Scored, better, fitted, price_per_hour
from hetero.planner.polish import shared_anew
from hetero.planner.problem import Problem
from hetero.planner.rings import Rings
from hetero.planner.space import TemplateSpace
from hetero.planner.templates import Template
from hetero.planner.thriftiest import Thriftiest

MOST_SCORED = 4
"""Covers by whole replicas that are simulated, the best by the formula first."""

TEMPLATE_SHARE, MOST_TEMPLATES_SHARE = 0.4, 0.5
"""Of the time for the first plan, for enumerating pipelines, and of all the time if none has been found by then."""


def first_plan(problem: Problem, candidates: Candidates, rings: Rings, clock: Clock, *, share: float) -> Scored | None:
    """The best plan of those that are quick to make; ``None`` if none fits, or ``clock`` is over before one is found.

    share: of ``clock``, after which a plan that was found is enough.
    """
    enough = clock.part(share)
    best: Scored | None = None
    longest = clock.part(MOST_TEMPLATES_SHARE)
    for plan in _by_whole_replicas(problem, candidates, rings, longest, enough.part(TEMPLATE_SHARE)):
        if best is not None and enough.is_over():
            break
        best = better(best, _scored(plan, problem, clock), problem)
    if best is None:
        thriftiest = Thriftiest(problem, Candidates(problem, num_gradient_groups=0)).plan()
        best = _scored(thriftiest, problem, clock) if thriftiest is not None else None
    if problem.goal == "time" and problem.budget_per_hour is None:
        uniform = best_plan(
            itertools.chain.from_iterable(every_uniform(problem, candidates).values()),
            problem,
            clock.part(share) if best is None else enough,
        )
        best = better(best, uniform, problem)
    return best


def _scored(plan: Plan, problem: Problem, clock: Clock) -> Scored | None:
    """As :func:`fitted`, within the budget."""
    if problem.budget_per_hour is not None and price_per_hour(plan, problem) > problem.budget_per_hour:
        return None
    try:
        return fitted(plan, problem, clock)
    except (PlanError, ConfigError):
        return None  # A link that only this plan needs is missing, for instance.


def _by_whole_replicas(
    problem: Problem, candidates: Candidates, rings: Rings, clock: Clock, enough: Clock
) -> Iterator[Plan]:
    """Plans of the best covers, by the formula."""
    fastest: dict[int, dict[int, Template]] = {}
    for template in TemplateSpace(problem, candidates).of_one_kind():
        if clock.is_over():
            break
        if template is None:
            continue
        (kind,) = (k for k, n in enumerate(template.devices) if n)
        of_samples = fastest.setdefault(template.samples, {})
        if kind not in of_samples or _rate(template) > _rate(of_samples[kind]):
            of_samples[kind] = template
        if enough.is_over():
            break
    covers: dict[Cover, Score] = {}
    for templates in fastest.values():
        alone = [[template] for template in templates.values()]
        for chosen in (list(templates.values()), *alone):
            if (cover := _cover(chosen, problem)) is not None:
                covers[cover] = score(cover, problem, rings)
    by_goal = sorted(covers.items(), key=lambda item: item[1].money if problem.goal == "money" else item[1].step_s)
    for cover, _ in by_goal[:MOST_SCORED]:
        yield expand(cover, problem)


def _rate(template: Template) -> float:
    """Samples per second and device."""
    return template.rate / sum(template.devices)


def _cover(templates: Sequence[Template], problem: Problem) -> Cover | None:
    """As many copies of each as there is room, samples and money for; ``None`` if samples do not divide."""
    batch = problem.global_batch_size
    rate = sum(_room(template, problem) * template.rate for template in templates)
    copies = []
    for template in templates:
        room = _room(template, problem)
        # A replica has a microbatch at least, and of those a part that is its speed's.
        most = int(batch // template.samples * room * template.rate / rate)
        copies.append((template, max(1, min(room, most))))
    if len(copies) == 1:
        ((template, number),) = copies
        microbatches, rest = divmod(batch, template.samples)
        return None if rest or microbatches < number else (Copies(template, number, microbatches),)
    longest_s = max(template.seconds(-(-batch // template.samples)) for template in templates)
    return shared_anew(copies, batch, longest_s)


def _room(template: Template, problem: Problem) -> int:
    room = min(k.num_devices // n for k, n in zip(problem.kinds, template.devices, strict=True) if n)
    if problem.budget_per_hour is not None and (price := milli_price(template, problem)):
        room = min(room, int(problem.budget_per_hour * 1000) // price)
    return max(1, room)
