"""A plan as a table, and as a picture of where each replica cuts the layers; what it is predicted to take."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from hetero.cost.memory import MemoryParts, device_memory
from hetero.cost.simulation.simulator import Simulation
from hetero.plan.ir import Plan, Stage
from hetero.report.plan_wording import (
    degrees,
    depth_of,
    depth_title,
    gradient_sync_of,
    held_by,
    in_turns,
    layers_of,
    orders_of,
    ranks_in_words,
    recompute_of,
    shape_of,
    title_of,
)
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB, MIB

if TYPE_CHECKING:
    # Every rank of a training run loads this module, and none of them needs a solver.
    from hetero.planner.plan_cluster import PlanResult
    from hetero.planner.reference.yardsticks import Yardstick

PICTURE_COLUMNS = 96
"""Boxes get no wider than this altogether, unless the model has more layers than that."""

UNKNOWN = "?"


def plan_table(plan: Plan) -> Table:
    """One row per stage of every replica. ``ranks`` and ``layers`` name the last one too: 0-3 are four."""
    table = Table(
        title=title_of(plan), title_justify="left", caption=_caption(plan), caption_justify="left", box=box.SQUARE
    )
    for header in ("replica", "samples", "stage"):
        table.add_column(header, justify="right")
    for header in ("layers", "ranks", "device"):
        table.add_column(header)
    for header in ("tp", "dp", "sp", "micro-\nbatch\nsize", "micro-\nbatches", depth_title(plan)):
        table.add_column(header, justify="right")
    table.add_column("recompute")

    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            share = f"{replica.num_samples} ({replica.num_samples / plan.global_batch_size:.0%})"
            table.add_row(
                *((str(r), share) if s == 0 else ("", "")),
                str(s),
                held_by(plan, stage),
                number_ranges(stage.ranks),
                stage.device,
                str(stage.tp),
                str(stage.dp),
                "yes" if stage.splits_sequence else "-",
                str(stage.micro_batch_size),
                str(replica.num_microbatches(s)),
                depth_of(stage),
                recompute_of(stage),
                end_section=s + 1 == len(replica.stages),
            )
    return table


def plan_picture(plan: Plan) -> str:
    """A wall of boxes: one course per replica, one box per stage, as wide as its share of the layers.

    Plain text, so that it can stand in a README. What does not fit a narrow box is shortened.
    """
    columns = _columns_per_layer(plan)
    walls = [{int(stage.start * columns) for stage in replica.stages} for replica in plan.replicas]
    width = plan.model.num_layers * columns
    labels = [
        (f"replica {r}", f"{replica.num_samples} of {plan.global_batch_size}", "samples")
        for r, replica in enumerate(plan.replicas)
    ]
    indent = max(len(line) for label in labels for line in label) + 2

    lines = []
    for r, replica in enumerate(plan.replicas):
        lines.append(" " * indent + _border(above=walls[r - 1] if r else set(), below=walls[r], width=width))
        boxes = [_box(stage, int(stage.num_layers * columns) - 1) for stage in replica.stages]
        for label, *cells in zip(labels[r], *boxes, strict=True):
            lines.append(label.ljust(indent) + "│" + "│".join(cells) + "│")
    lines.append(" " * indent + _border(above=walls[-1], below=set(), width=width))
    if plan.idle_ranks:
        lines.append("idle".ljust(indent) + ranks_in_words(plan.idle_ranks))
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """What a rank holds for the whole run, in bytes."""

    weights: int
    gradients: int
    optimizer: int


def static_memory_table(
    plan: Plan, measured: Sequence[StaticBytes], predicted: Mapping[tuple[int, int], MemoryParts]
) -> Table:
    """Weights, gradients and optimizer state by device group: the largest rank's, beside what was predicted.

    ``measured`` is by rank, zeros where nothing is held.
    """
    table = Table(title="Memory of one rank, MiB, measured | predicted", title_justify="left", box=box.SQUARE)
    for header in ("replica", "stage"):
        table.add_column(header, justify="right")
    table.add_column("ranks")
    for header in ("weights", "gradients", "optimizer"):
        table.add_column(header, justify="right")
    devices = device_memory(plan, predicted)
    for r, replica in enumerate(plan.replicas):
        for group in replica.device_groups:
            ranks, cells = replica.stages[group[0]].ranks, []
            for part in ("weights", "gradients", "optimizer"):
                largest = max(getattr(measured[rank], part) for rank in ranks)
                cells.append(f"{largest / MIB:.2f} | {getattr(devices[r, group[0]], part) / MIB:.2f}")
            table.add_row(str(r), number_ranges(group), number_ranges(ranks), *cells)
    return table


Memory = Mapping[tuple[int, int], MemoryParts]
"""Parts of one device of every stage at the device's peak, by replica and stage."""


def prediction_table(simulation: Simulation, memory: Memory, cluster: ClusterSpec) -> Table:
    """One row per device group of every sort of replica: where its step goes, and what its devices hold at the peak."""
    plan = simulation.plan
    table = Table(
        title=f"{title_of(plan)}: {simulation.step_s:.4g} s per step, {simulation.samples_per_s:.4g} samples/s",
        title_justify="left",
        caption=_caption(plan),
        caption_justify="left",
        box=box.SQUARE,
    )
    for header in ("replicas", "samples\neach", "stage"):
        table.add_column(header, justify="right")
    for header in ("layers", "device"):
        table.add_column(header)
    for header in ("tp", "dp", "micro-\nbatch", depth_title(plan)):
        table.add_column(header, justify="right")
    table.add_column("recompute")
    for header in ("busy", "bubble", "sync", "memory GiB"):
        table.add_column(header, justify="right")
    devices = device_memory(plan, memory)
    for members in plan.alike():
        first = members[0]
        replica = plan.replicas[first]
        for group in replica.device_groups:
            s, stages = group[0], [replica.stages[each] for each in group]
            stage, times = stages[0], simulation.stages[first, s]
            capacity_gib = cluster.device_of_rank(stage.ranks[0]).memory_gib
            used_gib = max(devices[r, s].total for r in members) / GIB
            table.add_row(
                *((str(len(members)), str(replica.num_samples)) if s == 0 else ("", "")),
                number_ranges(group),
                in_turns(held_by(plan, each) for each in stages),
                stage.device,
                str(stage.tp),
                str(stage.dp),
                str(stage.micro_batch_size),
                " | ".join(map(depth_of, stages)),
                in_turns(map(recompute_of, stages)),
                f"{times.busy_s / simulation.step_s:.0%}",
                f"{times.bubble_s / simulation.step_s:.0%}",
                f"{times.sync_s / simulation.step_s:.0%}",
                f"{used_gib:.1f} of {capacity_gib if capacity_gib is not None else UNKNOWN}",
                end_section=group == replica.device_groups[-1],
            )
    return table


def result_lines(result: "PlanResult") -> Iterator[str]:
    """What is known about a planner's answer, in words."""
    simulation = result.simulation
    yield (
        f"predicted: {simulation.step_s:.4g} s per step, {simulation.samples_per_s:.4g} samples/s, "
        f"{simulation.tokens_per_s:.4g} tokens/s; bubble {simulation.bubble_share:.1%}"
    )
    if simulation.confidence.is_estimate:
        confidence = simulation.confidence.name.lower().replace("_", " ")
        yield f"this rests on estimates ({confidence}): some layers were not measured on these devices"
    if result.score is None:
        yield f"the search found nothing in its time: the plan is the best of those made first (gap {result.gap:.1%})"
    else:
        yield (
            f"planner's formula: {result.score.step_s:.4g} s; none of its covers by {result.num_templates} templates "
            f"is below {result.bound_s:.4g} s (gap {result.gap:.1%})"
        )
    if simulation.step_s < result.bound_s:
        yield "the plan is shorter than that: the simulator prices it below the formula, or it is no such cover"
    yield f"all the work over all the speed: no plan whatever is below {result.lower_bound_s:.4g} s"
    ending = "" if result.finished else "; stopped by the time limit"
    yield f"planned in {result.planning_s:.1f} s{ending}"


def comparison_table(result: "PlanResult", others: "Sequence[Yardstick]", cluster: ClusterSpec) -> Table:
    """The planner's plan beside the yardsticks', all by the same simulator and the same memory check."""
    table = Table(
        title="The same cluster, planned in other manners", title_justify="left", box=box.SQUARE, show_lines=False
    )
    table.add_column("plan")
    for header in ("s per step", "samples/s", "this is\nfaster by", "bubble", "memory\npeak", "idle\nGPUs"):
        table.add_column(header, justify="right")
    table.add_column("replicas of stages")
    ours = result.scored
    for name, each in [("this planner", ours), *((other.name, other.best) for other in others)]:
        if each is None:
            table.add_row(name, "does not fit", *[""] * 6)
            continue
        table.add_row(
            name,
            f"{each.step_s:.4g}",
            f"{each.simulation.samples_per_s:.4g}",
            f"{each.step_s / result.simulation.step_s:.2f}x",
            f"{each.simulation.bubble_share:.0%}",
            fullest(each.memory, each.plan, cluster),
            str(len(each.plan.idle_ranks)),
            shape_of(each.plan),
        )
    return table


def fullest(memory: Memory, plan: Plan, cluster: ClusterSpec) -> str:
    """The largest share of any device's memory that its stages take, as ``92%``; ``?`` where none is known."""
    shares = []
    for (r, s), parts in device_memory(plan, memory).items():
        capacity_gib = cluster.device_of_rank(plan.replicas[r].stages[s].ranks[0]).memory_gib
        if capacity_gib is not None:
            shares.append(parts.total / (capacity_gib * GIB))
    return f"{max(shares):.0%}" if shares else UNKNOWN


def _caption(plan: Plan) -> str:
    lines = [f"idle ranks: {number_ranges(plan.idle_ranks) or 'none'}"]
    for what, said in (("gradient sums", gradient_sync_of(plan)), ("order", orders_of(plan))):
        lines += [f"{what}: {said}"] if said else []
    return "\n".join(lines)


def _box_lines(stage: Stage) -> list[tuple[str, str]]:
    """What a box says, line by line: in full, and in short."""
    layers, ranks = layers_of(stage), number_ranges(stage.ranks)
    return [
        (f"layer{'s' if len(stage.layer_numbers) > 1 else ''} {layers}", layers),
        (stage.device, stage.device),
        (ranks_in_words(stage.ranks) + degrees(stage), ranks + degrees(stage)),
    ]


def _box(stage: Stage, width: int) -> list[str]:
    """The lines of a box ``width`` columns wide inside."""
    room = width - 2
    cells = []
    for full, short in _box_lines(stage):
        text = full if len(full) <= room else short
        if len(text) > room:
            text = text[: room - 1] + "…" if room > 0 else ""
        cells.append(f" {text}".ljust(width)[:width])
    return cells


def _columns_per_layer(plan: Plan) -> int:
    """As many as the fullest box asks for, as long as the picture stays narrow; an even number if layers are cut."""
    wanted = max(
        math.ceil((max(len(full) for full, _ in _box_lines(stage)) + 3) / stage.num_layers)
        for _, _, stage in plan.stages()
    )
    columns = max(1, min(wanted, PICTURE_COLUMNS // plan.model.num_layers))
    cuts_layers = any(stage.ends_with_attention for _, _, stage in plan.stages())
    return columns + columns % 2 if cuts_layers else columns


def _border(*, above: set[int], below: set[int], width: int) -> str:
    """The line between two courses, whose boxes begin at the columns ``above`` and ``below``."""
    joints = {(False, False): "─", (True, False): "┴", (False, True): "┬", (True, True): "┼"}
    inner = "".join(joints[column in above, column in below] for column in range(1, width))
    left, right = ("┌", "┐") if not above else ("└", "┘") if not below else ("├", "┤")
    return left + inner + right
