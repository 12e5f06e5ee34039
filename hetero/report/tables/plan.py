"""A plan as a table, and as a picture of where each replica cuts the layers."""

import math
from fractions import Fraction

from rich.table import Table

from hetero.plan.ir import Plan, Stage
from hetero.report.plan_wording import (
    caption_of,
    degrees,
    depth_of,
    depth_title,
    device_of,
    held_by,
    layers_of,
    ranks_in_words,
    recompute_of,
    title_of,
)
from hetero.report.tables.fitting_table import FittingTable
from hetero.text import number_ranges

PICTURE_COLUMNS = 96
"""Boxes get no wider than this altogether, unless the model has more layers than that and room is not limited."""

LEAST_BOX = 4
"""Columns of the narrowest box, its wall included, for layers to get less than a column each."""


def plan_table(plan: Plan) -> Table:
    """One row per stage of every replica. ``ranks`` and ``layers`` name the last one too: 0-3 are four."""
    table = FittingTable(title=title_of(plan), caption=caption_of(plan), keys=3)
    for header in ("rep-\nlica", "samples", "stage"):
        table.add_column(header, justify="right")
    for header in ("layers", "ranks", "device"):
        table.add_column(header)
    for header in ("tp", "dp", "sp", "micro-\nbatch\nsize", "micro-\nbatches", depth_title(plan)):
        table.add_column(header, justify="right")
    table.add_column("recom-\npute")

    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            share = f"{replica.num_samples} ({replica.num_samples / plan.global_batch_size:z.0%})"
            table.add_row(
                *((str(r), share) if s == 0 else ("", "")),
                str(s),
                held_by(plan, stage),
                number_ranges(stage.ranks),
                device_of(stage),
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


def plan_picture(plan: Plan, *, room: int | None = None) -> str:
    """Boxes in rows: a row per replica, a box per stage, as wide as its share of the layers.

    Plain text, so that it can stand in a README. What does not fit a narrow box is shortened.

    Args:
        room: columns of the terminal. If a stage would have no box to speak of in it, a line says that.
    """
    labels = [
        (f"replica {r}", f"{replica.num_samples} of {plan.global_batch_size}", "samples")
        for r, replica in enumerate(plan.replicas)
    ]
    indent = max(len(line) for label in labels for line in label) + 2
    columns = _columns_per_layer(plan, None if room is None else room - indent - 1)
    if columns is None:
        return f"no picture: the stages do not have boxes side by side in {room} columns"
    walls = [{int(stage.start * columns) for stage in replica.stages} for replica in plan.replicas]
    width = int(plan.model.num_layers * columns)

    lines = []
    for r, replica in enumerate(plan.replicas):
        lines.append(" " * indent + _border(above=walls[r - 1] if r else set(), below=walls[r], width=width))
        boxes = [_box(stage, int(stage.end * columns) - int(stage.start * columns) - 1) for stage in replica.stages]
        for label, *cells in zip(labels[r], *boxes, strict=True):
            lines.append(label.ljust(indent) + "│" + "│".join(cells) + "│")
    lines.append(" " * indent + _border(above=walls[-1], below=set(), width=width))
    if plan.idle_ranks:
        lines.append("idle".ljust(indent) + ranks_in_words(plan.idle_ranks))
    return "\n".join(lines)


def _box_lines(stage: Stage) -> list[tuple[str, str]]:
    """What a box says, line by line: in full, and in short."""
    layers, ranks = layers_of(stage), number_ranges(stage.ranks)
    return [
        (f"layer{'s' if len(stage.layer_numbers) > 1 else ''} {layers}", layers),
        (device_of(stage), device_of(stage)),
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


def _columns_per_layer(plan: Plan, room: int | None) -> Fraction | None:
    """As many as the fullest box asks for, as long as the picture stays narrow; an even number if layers are cut.

    Less than one where ``room`` asks for it, ``None`` if that leaves a box with less than :data:`LEAST_BOX`.
    """
    num_layers, most = plan.model.num_layers, PICTURE_COLUMNS if room is None else min(PICTURE_COLUMNS, room)
    wanted = max(
        math.ceil((max(len(full) for full, _ in _box_lines(stage)) + 3) / stage.num_layers)
        for _, _, stage in plan.stages()
    )
    columns = max(1, min(wanted, most // num_layers))
    cuts_layers = any(stage.ends_with_attention for _, _, stage in plan.stages())
    columns += columns % 2 if cuts_layers else 0
    if room is None:
        return Fraction(columns)
    scale = min(Fraction(columns), Fraction(max(0, most), num_layers))
    narrowest = min(int(stage.end * scale) - int(stage.start * scale) for _, _, stage in plan.stages())
    return scale if narrowest >= LEAST_BOX else None


def _border(*, above: set[int], below: set[int], width: int) -> str:
    """The line between two rows, whose boxes begin at the columns ``above`` and ``below``."""
    joints = {(False, False): "─", (True, False): "┴", (False, True): "┬", (True, True): "┼"}
    inner = "".join(joints[column in above, column in below] for column in range(1, width))
    left, right = ("┌", "┐") if not above else ("└", "┘") if not below else ("├", "┤")
    return left + inner + right
