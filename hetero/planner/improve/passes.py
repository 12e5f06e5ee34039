"""Lists the passes over finished plans in their order: what each changes, and its share of the time.

Every pass has one signature: a shortlist of scored plans, the problem and a deadline in; a plan out that is legal, fits
and is not worse than the best of the list. When the time is over, that is the best plan as it was.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hetero.planner.deadline import Deadline
from hetero.planner.improve.gradient_sync import choose_gradient_sync
from hetero.planner.improve.half_layers import cut_layers_in_half
from hetero.planner.improve.interleaving import interleave
from hetero.planner.improve.local_search import change_locally
from hetero.planner.improve.residency import choose_residency
from hetero.planner.improve.split_backward import split_backwards
from hetero.planner.improve.whole_plans import search_whole_plans
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist

Improve = Callable[[Shortlist, Problem, Deadline], ScoredPlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImprovementPass:
    """One pass: a row of the table.

    share: of the time that is left when the pass begins.
    """

    name: str
    changes: str
    share: float
    improve: Improve


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
    ),
)


def improved(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """Run all passes, each from the best plan of the one before."""
    for each in PASSES:
        shortlist = shortlist.led_by(each.improve(shortlist, problem, deadline.part(each.share)))
    return shortlist.best
