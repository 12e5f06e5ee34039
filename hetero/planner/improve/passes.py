"""Lists the passes over finished plans in their order: what each changes, and its share of the time.

Every pass has one signature: a shortlist of scored plans, the problem and a deadline in; a plan out that is legal, fits
and is not worse than the best of the list. When the time is over, that is the best plan as it was.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero.plan.ir import Plan
from hetero.planner.deadline import Deadline
from hetero.planner.improve.gradient_sync import choose_gradient_sync
from hetero.planner.improve.half_layers import cut_layers_in_half
from hetero.planner.improve.interleaving import interleave
from hetero.planner.improve.local_search import change_locally
from hetero.planner.improve.residency import choose_residency
from hetero.planner.improve.split_backward import split_backwards
from hetero.planner.improve.whole_plans import WholePlansSearch, search_whole_plans
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, better_of, goal_value, is_better

MOST_STARTS = 4
"""Plans of the shortlist that any pass begins with, at most. A heuristic."""

Improve = Callable[[Shortlist, Problem, Deadline], ScoredPlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImprovementPass:
    """One pass: a row of the table.

    share: of the time that is left when the pass begins.
    going_on: makes the same pass for one problem, which goes on where it was when it is called again; ``None`` for one
        that begins anew.
    """

    name: str
    changes: str
    share: float
    improve: Improve
    going_on: Callable[[Problem], Improve] | None = None


PASSES = (
    ImprovementPass(
        name="gradient sync",
        changes="domains and bucket size of the gradient sums",
        share=0.1,
        improve=choose_gradient_sync,
    ),
    ImprovementPass(
        name="interleaving",
        changes="stages per device group, with their depths",
        share=0.15,
        improve=interleave,
    ),
    ImprovementPass(
        name="residency",
        changes="where memory is short: layers computed again, what is left to hosts, previews",
        share=0.25,
        improve=choose_residency,
    ),
    ImprovementPass(
        name="local search",
        changes="one layer, microbatch, depth, share of the samples or half layer at a time",
        share=0.15,
        improve=change_locally,
    ),
    ImprovementPass(
        name="half layers",
        changes="plans of other covers, levelled by half layers, and a local search from the best",
        share=0.1,
        improve=cut_layers_in_half,
    ),
    ImprovementPass(
        name="split backwards",
        changes="delays of the weights' gradients, and a few small changes with them",
        share=0.2,
        improve=split_backwards,
    ),
    ImprovementPass(
        name="residency again",
        changes="the same for the plan that the passes before made",
        share=0.3,
        improve=choose_residency,
    ),
    ImprovementPass(
        name="gradient sync again",
        changes="domains and bucket size of the plan that the passes before made",
        share=0.1,
        improve=choose_gradient_sync,
    ),
    ImprovementPass(
        name="whole plans",
        changes="everything that a plan says, and what its replicas are made of, from several plans",
        share=1.0,
        improve=search_whole_plans,
        going_on=lambda problem: WholePlansSearch(problem).go_on,
    ),
)


def improved(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """Run all passes, each from the best plan of the one before."""
    for each in PASSES:
        shortlist = shortlist.led_by(each.improve(shortlist, problem, deadline.part(each.share)))
    return shortlist.best


class Improvement:
    """The passes of one problem, asked again and again with more time and other plans.

    Each time the best plan of the construction goes through the passes that begin anew, unless it has been through all
    of them already. What they make of it is one of the plans that the passes that go on begin with, beside the best one
    so far.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._going_on = [row.going_on(problem) for row in PASSES if row.going_on is not None]
        self._been_through: set[tuple[Plan, ...]] = set()
        # What the passes made, by the plan that they began with.
        self._improved: dict[Plan, ScoredPlan] = {}
        self.best: ScoredPlan | None = None
        self.is_through = False

    @property
    def plans(self) -> list[ScoredPlan]:
        """The best plan and what the passes made of those of each rung, the best first."""
        every = [*self._improved.values(), *([] if self.best is None else [self.best])]
        return sorted(every, key=lambda each: goal_value(each, self._problem))

    def go_on(self, deadline: Deadline) -> None:
        """Give the passes that go on more time, with the plans that they have."""
        if self.best is not None:
            self._search(self.best, (), deadline)

    def improve(self, shortlist: Shortlist, deadline: Deadline) -> None:
        """Make the most of these plans."""
        problem, step, first = self._problem, deadline.part(1.0), shortlist.best.plan
        begun_with = tuple(each.plan for each in shortlist.starts(MOST_STARTS))
        if begun_with not in self._been_through:
            passes = step.part(1.0)
            for row in PASSES:
                if row.going_on is None:
                    shortlist = shortlist.led_by(row.improve(shortlist, problem, passes.part(row.share)))
            if not passes.ran_out:
                self._been_through.add(begun_with)
        start = shortlist.best
        self.best = better_of(self.best, start, problem) or start
        if first not in self._improved or is_better(start, self._improved[first], problem):
            self._improved[first] = start
        self._search(self.best, shortlist.others, step)
        self.is_through = not step.ran_out

    def _search(self, start: ScoredPlan, others: Sequence[ScoredPlan], deadline: Deadline) -> None:
        """Run the passes that go on from ``start``, beside the best plan and those that were improved before."""
        for improve in self._going_on:
            found = improve(Shortlist(start, (*self.plans, *others)), self._problem, deadline.part(1.0))
            self.best = better_of(self.best, found, self._problem)
