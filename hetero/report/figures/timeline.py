"""One simulated step as it runs: a row per device group with its computes, and below them what is on the wires."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path

from hetero.report.content import DeviceRow, Report
from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting
from hetero.report.figures.colours import (
    BACKWARD,
    COLOURS,
    FAINT,
    FORWARD,
    INK,
    PAPER,
    QUIET,
    SEND_B,
    SEND_F,
    SUM,
    UPDATE,
    WAIT,
    WEIGHTS,
    device_colour,
    ink_on,
    lighter,
    stage_colour,
    work_colour,
)
from hetero.report.plan_wording import device_of, in_turns, layers_of
from hetero.schedule.actions import COMPUTE, ActionKind

MOST_ROWS = 28

WHOLE_UP_TO = 40
"""Microbatches of a step that is drawn from end to end; of a longer one, its beginning and its end are."""

HEAD_MICROBATCHES, TAIL_MICROBATCHES = 10, 6
"""Beside one per stage, about so many are seen at the beginning and at the end of a longer step."""

ROW_IN, TITLE_IN, LABEL_IN, AXIS_IN, LEGEND_IN, CUT_IN = 0.4, 0.27, 2.35, 0.45, 0.3, 0.34

LEGEND_COLUMNS = 9

_KINDS = {
    ActionKind.F: FORWARD,
    ActionKind.R: FORWARD,
    ActionKind.B: BACKWARD,
    ActionKind.I: BACKWARD,
    ActionKind.W: WEIGHTS,
    ActionKind.SEND_F: SEND_F,
    ActionKind.SEND_B: SEND_B,
}

_LANES = dict.fromkeys((FORWARD, BACKWARD, WEIGHTS, WAIT, UPDATE), (0.06, 0.56)) | {
    SEND_F: (0.65, 0.09), SEND_B: (0.76, 0.09), SUM: (0.87, 0.09),
}  # fmt: skip
"""Top and height within a row."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Something drawn from one second to another on a row.

    number: the microbatch of a compute.
    colour: lighter for the later stages of devices that hold several in turns.
    """

    what: str
    start_s: float
    end_s: float
    colour: str
    number: int | None = None


def timeline_drawing(report: Report) -> Drawing:
    """The step of every group of replicas, as far as the rows go."""
    rows = report.drawn_rows(MOST_ROWS)
    tops, bottom = _tops(rows)
    left_out = len(report.groups) - len({row.group for row in rows})
    entries = _legend_entries(report, rows)
    legend_in = LEGEND_IN * -(-len(entries) // LEGEND_COLUMNS)
    height_in = bottom + AXIS_IN + legend_in + (0.2 if left_out else 0.0)

    def draw(canvas: FigureBase) -> None:
        blocks = _blocks(report, rows)
        labels = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        labels.set_zorder(2)  # A long title goes on above the first window.
        for row, top in zip(rows, tops, strict=True):
            _label(labels, report, row, top)
        windows = _windows(report, rows)
        room = WIDTH_IN - LABEL_IN - CUT_IN * (len(windows) - 1) - 0.1
        shown_s = sum(end_s - start_s for start_s, end_s in windows)
        left = LABEL_IN
        for start_s, end_s in windows:
            width = room * (end_s - start_s) / shown_s
            axes = axes_in(canvas, height_in, left=left, top=0, width=width, height=bottom, bare=False)
            _draw_window(axes, blocks, tops, bottom, (start_s, end_s), (end_s - start_s) / width)
            left += width + CUT_IN
        if len(windows) == 2:
            gap_s = windows[1][0] - windows[0][1]
            at = LABEL_IN + room * (windows[0][1] - windows[0][0]) / shown_s + CUT_IN / 2
            text = f"{gap_s:.3g} s in between are not drawn"
            labels.text(at, bottom / 2, text, rotation=90, ha="center", va="center", color=QUIET, fontsize=7)
        if left_out:
            note = f"{left_out} more groups of replicas are not drawn; the table has them"
            labels.text(0.02, height_in - legend_in - 0.1, note, color=QUIET, va="center")
        labels.legend(
            handles=entries, loc="lower left", bbox_to_anchor=(0, 0), bbox_transform=labels.transAxes,
            ncols=min(len(entries), LEGEND_COLUMNS), frameon=False, fontsize=7.5, handlelength=1.3, handleheight=0.9,
            columnspacing=1.4, borderaxespad=0.1,
        )  # fmt: skip

    return Drawing(height_in=height_in, draw=draw)


def is_cut(report: Report) -> bool:
    """Whether the middle of the step is left out."""
    return len(_windows(report, report.drawn_rows(MOST_ROWS))) > 1


def _tops(rows: Sequence[DeviceRow]) -> tuple[list[float], float]:
    """Where each row begins, below its group's title, and where the last one ends."""
    tops = []
    at = 0.0
    for row in rows:
        at += TITLE_IN if row.is_first else 0.0
        tops.append(at)
        at += ROW_IN
    return tops, at + 0.05


def _windows(report: Report, rows: Sequence[DeviceRow]) -> list[tuple[float, float]]:
    """Seconds from and to that are drawn, in one scale: all of the step, or its beginning and its end."""
    step_s = report.simulation.step_s
    counts = [row.num_microbatches for row in rows]
    if max(counts) <= WHOLE_UP_TO:
        return [(0.0, step_s)]
    compute_end_s = report.simulation.compute_end_s
    period_s = compute_end_s * len(counts) / sum(counts)
    depth = max(len(row.replica.stages) for row in rows)
    head_s = (depth + HEAD_MICROBATCHES) * period_s
    tail_s = (step_s - compute_end_s) + (depth + TAIL_MICROBATCHES) * period_s
    if head_s + tail_s > 0.8 * step_s:
        return [(0.0, step_s)]
    return [(0.0, head_s), (step_s - tail_s, step_s)]


def _blocks(report: Report, rows: Sequence[DeviceRow]) -> list[list[_Block]]:
    """Everything that each row shows, of the first replica of its group."""
    simulation = report.simulation
    sums = _sums(report, rows)
    blocks = []
    for row, summed in zip(rows, sums, strict=True):
        device = row.stage.device
        own = [
            _Block(
                _KINDS[span.kind],
                span.start_s,
                span.end_s,
                lighter(work_colour(report, _KINDS[span.kind], device), row.indices.index(span.stage)),
                span.number if span.kind in COMPUTE else None,
            )
            for span in simulation.spans_of(row.members[0])
            if span.stage in row.indices
        ]
        update_s, updated_s = simulation.update_of(row.members[0], row.index)
        own.append(_Block(WAIT, update_s - row.times.sync_s, update_s, COLOURS[WAIT]))
        own.append(_Block(UPDATE, update_s, updated_s, COLOURS[UPDATE]))
        blocks.append(own + summed)
    return blocks


def _sums(report: Report, rows: Sequence[DeviceRow]) -> list[list[_Block]]:
    """The sums of gradients, and gathers of updated weights, that each row's devices take part in."""
    row_of = {rank: i for i, row in enumerate(rows) for rank in row.stage.ranks}
    sums: list[list[_Block]] = [[] for _ in rows]
    for sync in (*report.simulation.syncs, *report.simulation.gathers):
        for i in sorted({row_of[rank] for rank in sync.bucket.ranks if rank in row_of}):
            sums[i].append(_Block(SUM, sync.start_s, sync.end_s, COLOURS[SUM]))
    return sums


def _draw_window(
    axes: Axes,
    blocks: Sequence[Sequence[_Block]],
    tops: Sequence[float],
    bottom: float,
    window: tuple[float, float],
    s_per_in: float,
) -> None:
    axes.set_xlim(*window)
    axes.set_ylim(bottom, 0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.set_yticks([])
    axes.tick_params(length=3, labelsize=7.5)
    axes.set_xlabel("" if window[0] else "seconds", fontsize=7.5, loc="left")
    axes.xaxis.grid(True, color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    for above, top in zip([0.0, *(top + ROW_IN for top in tops)], tops, strict=False):
        if top > above:
            # No line of the grid through a title.
            axes.add_patch(Rectangle((window[0], above), window[1] - window[0], top - above, facecolor=PAPER, zorder=1))
        # Waiting is what is left of this band.
        lane_top, lane_height = _LANES[FORWARD]
        corner = window[0], top + lane_top * ROW_IN
        axes.add_patch(Rectangle(corner, window[1] - window[0], lane_height * ROW_IN, facecolor="#f1f3f6"))
    clipped = [
        [
            replace(b, start_s=max(b.start_s, window[0]), end_s=min(b.end_s, window[1]))
            for b in row
            if b.end_s > window[0] and b.start_s < window[1] and b.end_s > b.start_s
        ]
        for row in blocks
    ]
    kinds = list(COLOURS)
    drawn = sorted({(kinds.index(b.what), b.colour) for row in clipped for b in row})
    for what, colour in ((kinds[kind], colour) for kind, colour in drawn):
        rectangles = [
            (b.start_s, b.end_s, top + _LANES[what][0] * ROW_IN, top + sum(_LANES[what]) * ROW_IN)
            for row, top in zip(clipped, tops, strict=True)
            for b in row
            if b.what == what and b.colour == colour
        ]
        # White sets computes apart; a transfer of microseconds is drawn wider than it is, to be seen.
        edge = PAPER if what in (FORWARD, BACKWARD, WEIGHTS) else "none" if what == WAIT else colour
        axes.add_patch(
            PathPatch(_boxes(rectangles), facecolor=colour, edgecolor=edge, linewidth=0.4, hatch=_hatch(what))
        )
    _number(axes, clipped, tops, s_per_in)


def _hatch(what: str) -> str | None:
    return "////" if what == WAIT else None


def _boxes(rectangles: Iterable[tuple[float, float, float, float]]) -> Path:
    """One path through all (left, right, top, bottom): much smaller in a file than one each."""
    corners = np.array([[(a, t), (b, t), (b, u), (a, u), (a, t)] for a, b, t, u in rectangles])
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(corners))
    return Path(corners.reshape(-1, 2), codes)


def _number(axes: Axes, blocks: Sequence[Sequence[_Block]], tops: Sequence[float], s_per_in: float) -> None:
    """Microbatches by number, where there is room."""
    lane_top, lane_height = _LANES[FORWARD]
    for row, top in zip(blocks, tops, strict=True):
        middle = top + (lane_top + lane_height / 2) * ROW_IN
        for block in row:
            if block.number is None:
                continue
            text = str(block.number)
            if (block.end_s - block.start_s) / s_per_in > 0.055 * len(text) + 0.03:
                at = (block.start_s + block.end_s) / 2
                ink = ink_on(block.colour)
                axes.text(at, middle, text, ha="center", va="center_baseline", fontsize=5.8, color=ink)


def _label(axes: Axes, report: Report, row: DeviceRow, top: float) -> None:
    if row.is_first:
        title = fitting([report.group_title(row)], room_in=WIDTH_IN, size_pt=8)
        axes.text(0.02, top - TITLE_IN / 2 + 0.03, title, va="center", weight="bold", fontsize=8)
    colours = list(dict.fromkeys(stage_colour(report, r, row.place, row.stage.device) for r in row.members))
    for i, colour in enumerate(colours):
        height = 0.72 * ROW_IN / len(colours)
        corner = 0.03, top + 0.04 * ROW_IN + i * height
        axes.add_patch(Rectangle(corner, 0.1, height, facecolor=colour))
    stage = row.stage
    devices = f"{len(stage.ranks)} × {device_of(stage)}"
    room = LABEL_IN - 0.3
    first = fitting([f"{row.title} · {devices}", devices], room_in=room, size_pt=7.5)
    axes.text(0.2, top + 0.24 * ROW_IN, first, va="center", fontsize=7.5, color=INK)
    layers = f"layers {in_turns(map(layers_of, row.stages))}"
    second = fitting([f"{layers} · tp {stage.tp} · dp {stage.dp}", layers], room_in=room, size_pt=6.5)
    axes.text(0.2, top + 0.62 * ROW_IN, second, va="center", fontsize=6.5, color=QUIET)


def _legend_entries(report: Report, rows: Sequence[DeviceRow]) -> list[Patch]:
    """What each colour is for: kinds of work; by device, the types in place of forwards and backwards."""
    splits_backward = any(stage.wgrad_delay is not None for row in rows for stage in row.stages)
    shown = {what: colour for what, colour in COLOURS.items() if what != WEIGHTS or splits_backward}
    entries = []
    if report.colours == "device":
        shown = {what: colour for what, colour in shown.items() if what not in (FORWARD, BACKWARD, WEIGHTS)}
        devices = dict.fromkeys(row.stage.device for row in rows)
        entries = [Patch(facecolor=device_colour(report, device), label=device) for device in devices]
    entries += [Patch(facecolor=colour, label=what, hatch=_hatch(what)) for what, colour in shown.items()]
    return [*entries, Patch(facecolor="#f1f3f6", label="waits")]
