"""What the planner knows about its plan, in words, and beside other planners' plans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from hetero.cost.model_flops import Products, Utilization
from hetero.planner.certainty import Certainty, Rival
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick
from hetero.planner.ring_interfaces import RingsWithOneInterface
from hetero.report.plan_wording import range_of, shape_of
from hetero.report.tables.certainty import CommandsOf, certainty_lines, utilization_lines
from hetero.report.tables.fitting_table import FittingTable
from hetero.report.tables.prediction import fullest
from hetero.spec.cluster import ClusterSpec
from hetero.units import BYTES_OF_PRECISION

if TYPE_CHECKING:
    from hetero.planner.plan_cluster import PlanResult


def result_lines(
    result: "PlanResult", certainty: Certainty, utilizations: Mapping[Products, Utilization], commands_of: CommandsOf
) -> Iterator[str]:
    """What is known about a planner's answer, in words.

    commands_of: the command lines that measure a profile, and plan again with it.
    """
    simulation = result.simulation
    yield (
        f"predicted: {simulation.step_s:.4g} s per step ({range_of(certainty.step)}), "
        f"{simulation.samples_per_s:.4g} samples/s, {simulation.tokens_per_s:.4g} tokens/s; "
        f"bubble {simulation.bubble_share:z.1%}"
    )
    yield from utilization_lines(utilizations)
    if simulation.confidence.is_estimate:
        confidence = simulation.confidence.name.lower().replace("_", " ")
        yield f"this rests on estimates ({confidence}): some layers were not measured on these devices"
    yield from certainty_lines(certainty, commands_of)
    if result.score is None:
        yield "the search found nothing in its time: the plan is the best of those made first"
    else:
        yield (
            f"against the planner's own formula and templates: {result.score.step_s:.4g} s; none of its covers by "
            f"{result.num_templates} templates is below {result.bound_s:.4g} s (gap {result.gap:z.1%})"
        )
    if simulation.step_s < result.bound_s:
        yield "the plan is shorter than that: the simulator prices it below the formula, or it is no such cover"
    yield (
        f"against any plan whatever, by the simulator: none is below {result.lower_bound_s:.4g} s, so at most "
        f"{result.gap_to_any:z.1%} of the step could be saved (gap to any plan)"
    )
    if result.rings is not None:
        yield from rings_lines(result.rings)
    ending = "" if result.finished else "; stopped by the time limit"
    searched = f" by {result.processes} processes" if result.processes > 1 else ""
    yield f"planned in {result.planning_s:.1f} s{searched}{ending}"
    for exit_code in result.failed_processes:
        yield (
            f"warning: one of the {result.processes} processes ended without an answer, with exit code {exit_code}, as "
            "one does that lacks memory; plan again with fewer --processes"
        )


def unusable_lines(problem: Problem) -> Iterator[str]:
    """Which node types idle in every plan since their devices lack the precision, and what all have, in words."""
    precisions_of = {
        each.device: problem.cluster.device_types.of(each.device).precisions for each in problem.node_types
    }
    common = [each for each in BYTES_OF_PRECISION if all(each in those for those in precisions_of.values())]
    for node_type in problem.node_types:
        if problem.precision not in precisions_of[node_type.device]:
            yield (
                f"warning: node type {node_type.name!r} idles: {node_type.device} has no {problem.precision}; all "
                f"device types of this cluster have {', '.join(common)} (--precision)"
            )


def rings_lines(rings: RingsWithOneInterface) -> Iterator[str]:
    """What a plan owes to the assumption about rings, in words."""
    yield (
        "assumed: a ring over several devices of a node has all of its network interfaces; with one, "
        f"{rings.step_s:.4g} s per step. A measurement of it belongs under links.ring_interfaces"
    )
    if rings.passed_over is not None:
        all_s, one_s = rings.passed_over
        yield f"passed over, since it suits one case only: a plan of {all_s:.4g} s with all, {one_s:.4g} s with one"


def comparison_table(
    result: "PlanResult", others: Sequence[Yardstick], cluster: ClusterSpec, rivals: Sequence[Rival]
) -> Table:
    """The planner's plan beside the yardsticks', all by the same simulator and the same memory check.

    rivals: how the plan stands against the yardsticks, by their names; a question mark is for what is not certain.
    """
    table = FittingTable(title="The same cluster, planned in other manners")
    table.add_column("plan")
    for header in ("s per step", "samples/s", "this is\nfaster by", "bubble", "memory\npeak", "idle\nGPUs"):
        table.add_column(header, justify="right")
    table.add_column("replicas of stages")
    ours = Yardstick(name="this planner", best=result.scored)
    uncertain = {rival.name for rival in rivals if not rival.is_certain}
    for other in (ours, *others):
        if (each := other.best) is None:
            table.add_row(other.name, *["-"] * 6, other.why_none)
            continue
        table.add_row(
            other.name,
            f"{each.step_s:.4g}",
            f"{each.simulation.samples_per_s:.4g}",
            f"{each.step_s / result.simulation.step_s:.2f}x{' ?' if other.name in uncertain else ''}",
            f"{each.simulation.bubble_share:z.0%}",
            fullest(each.memory, each.plan, cluster),
            str(len(each.plan.idle_ranks)),
            shape_of(each.plan),
        )
    return table
