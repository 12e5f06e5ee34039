"""Bars: what a device holds at its peak, and how long a step takes under other plans."""

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch, Rectangle

from hetero.report.content import DeviceRow, Report, named
from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting
from hetero.report.figures.colours import FAINT, INK, PAPER, QUIET, stage_colour
from hetero.report.plan_wording import device_of
from hetero.units import GIB

MOST_ROWS = 40

ROW_IN, AXIS_IN, LEGEND_IN = 0.3, 0.45, 0.46

STAGE_IN, NAME_IN = 2.9, 1.5
"""Room for what stands to the left of the bars: a stage, or the name of a plan."""

VALUE_IN = 1.9
"""Room for the figures to the right of the bars."""

SPARE = 1.01
"""The axis ends so many times beyond the longest bar."""

PART_COLOURS = {
    "weights": "#1f4e86",
    "gradients": "#4b83bd",
    "optimizer": "#9cc1e2",
    "activations": "#c96f12",
    "logits": "#eda94e",
    "deferred": "#8a3f0c",
    "working": "#f7d9a8",
    "boundary_buffers": "#1e7d62",
    "sync_buffers": "#7cc0a8",
    "context": "#7d4a93",
    "communicators": "#bd96cc",
    "held_by_collectives": "#8f98a6",
    "slack": "#aeb5bf",
}
"""By kind of memory: what the parameters need, what a microbatch leaves behind, buffers, the process itself."""

CUT_AT = 4.0
"""Bars more than so many times as long as this plan's are cut, which leaves the others a length to be compared by."""

OURS, THEIRS = "#2c8a6d", "#b7c0cc"


def memory_drawing(report: Report) -> Drawing:
    """One bar per device group, stacked by the parts of the cost model, with a line at the device's capacity."""
    rows = report.drawn_rows(MOST_ROWS)
    left_out = sum(len(row.indices) for row in report.rows) - sum(len(row.indices) for row in rows)
    bottom = len(rows) * ROW_IN + 0.05
    height_in = bottom + AXIS_IN + LEGEND_IN + (0.2 if left_out else 0.0)
    widest = max(max(row.memory.total, row.capacity_bytes or 0) for row in rows) / GIB

    def draw(canvas: FigureBase) -> None:
        page = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        bars = _bar_axes(canvas, (height_in, bottom), left=STAGE_IN, most=widest, unit="GiB of one device")
        bars.xaxis.grid(True, color=FAINT, linewidth=0.5)
        for i, row in enumerate(rows):
            _draw_memory(page, bars, report, row, (i + 0.5) * ROW_IN)
        if left_out:
            note = f"{left_out} more stages are not drawn; the table has them"
            page.text(0.02, height_in - LEGEND_IN - 0.1, note, color=QUIET, va="center")
        shown = {name for row in rows for name, num_bytes in row.memory.named().items() if num_bytes}
        colours = {name.replace("_", " "): colour for name, colour in PART_COLOURS.items() if name in shown}
        handles = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
        handles.append(Patch(facecolor=INK, label="line: capacity"))
        page.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0, 0), bbox_transform=page.transAxes, ncols=6,
            frameon=False, fontsize=7.5, handlelength=1.3, handleheight=0.9, columnspacing=1.8, borderaxespad=0.1,
        )  # fmt: skip

    return Drawing(height_in=height_in, draw=draw)


def comparison_drawing(report: Report) -> Drawing:
    """Seconds per step of the plan and of each yardstick; a bar beyond :data:`CUT_AT` is broken, its figure is not."""
    compared = report.compared
    bottom = len(compared) * ROW_IN + 0.05
    height_in = bottom + AXIS_IN
    ours_s = report.simulation.step_s
    longest_s = min(max(each.best.step_s for each in compared if each.best is not None), CUT_AT * ours_s)

    def draw(canvas: FigureBase) -> None:
        page = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        width_in = (WIDTH_IN - NAME_IN - VALUE_IN) / SPARE
        bars = _bar_axes(canvas, (height_in, bottom), left=NAME_IN, most=longest_s, unit="seconds per step, simulated")
        for i, each in enumerate(compared):
            middle = (i + 0.5) * ROW_IN
            weight = "bold" if i == 0 else "normal"
            text = fitting([each.name], room_in=NAME_IN - 0.1, size_pt=8)
            page.text(NAME_IN - 0.1, middle, text, ha="right", va="center", fontsize=8, weight=weight)
            if (best := each.best) is None:
                why = fitting([each.why_none], room_in=WIDTH_IN - NAME_IN - 0.1, size_pt=8)
                page.text(NAME_IN + 0.05, middle, why, va="center", color=QUIET, fontsize=8)
                continue
            corner, shown_s = (0.0, middle - 0.3 * ROW_IN), min(best.step_s, longest_s)
            bars.add_patch(Rectangle(corner, shown_s, 0.6 * ROW_IN, facecolor=OURS if i == 0 else THEIRS))
            if shown_s < best.step_s:
                _break(bars, longest_s, middle)
            times = "" if i == 0 else f"  ({best.step_s / ours_s:.2f} × as long)"
            page.text(
                NAME_IN + width_in * shown_s / longest_s + 0.07, middle, f"{best.step_s:.4g} s{times}",
                va="center", fontsize=8, weight=weight,
            )  # fmt: skip

    return Drawing(height_in=height_in, draw=draw)


def _break(bars: Axes, length: float, middle: float) -> None:
    """Two slanted gaps near the end of a bar: it goes on for longer than it is drawn."""
    for at in (0.93, 0.945):
        ends = [(at - 0.005) * length, (at + 0.005) * length]
        bars.plot(ends, [middle + 0.36 * ROW_IN, middle - 0.36 * ROW_IN], color=PAPER, linewidth=2.2)


def _bar_axes(canvas: FigureBase, heights: tuple[float, float], *, left: float, most: float, unit: str) -> Axes:
    """Where the bars go: from 0 to a bit above ``most``. ``heights`` are the canvas's and that of all bars."""
    height_in, bottom = heights
    width = WIDTH_IN - left - VALUE_IN
    axes = axes_in(canvas, height_in, left=left, top=0, width=width, height=bottom, bare=False)
    axes.set_xlim(0, SPARE * most)
    axes.set_ylim(bottom, 0)
    axes.set_yticks([])
    axes.set_xlabel(unit, fontsize=7.5, loc="left")
    axes.tick_params(length=3, labelsize=7.5)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    return axes


def _draw_memory(page: Axes, bars: Axes, report: Report, row: DeviceRow, middle: float) -> None:
    corner = 0.03, middle - 0.3 * ROW_IN
    colour = stage_colour(report, row.members[0], row.place, row.stage.device)
    page.add_patch(Rectangle(corner, 0.1, 0.6 * ROW_IN, facecolor=colour))
    owner = named("replica", row.members) if report.names_each_replica else f"group {row.group}"
    texts = [f"{owner} · {row.title} · {device_of(row.stage)}", f"{row.title} · {device_of(row.stage)}"]
    page.text(0.2, middle, fitting(texts, room_in=STAGE_IN - 0.3, size_pt=8), va="center", fontsize=8)
    height = 0.6 * ROW_IN
    left = 0.0
    for name, num_bytes in row.memory.named().items():
        corner = left, middle - height / 2
        colour = PART_COLOURS[name]
        bars.add_patch(Rectangle(corner, num_bytes / GIB, height, facecolor=colour, edgecolor="white", linewidth=0.3))
        left += num_bytes / GIB
    used_gib, used = row.memory.total / GIB, f"{row.memory.total / GIB:.1f} GiB"
    if row.capacity_bytes is not None:
        at = row.capacity_bytes / GIB
        bars.plot([at, at], [middle - 0.46 * ROW_IN, middle + 0.46 * ROW_IN], color=INK, linewidth=1.8)
        used = f"{used_gib:.1f} of {at:.0f} GiB ({used_gib / at:z.0%})"
    page.text(WIDTH_IN - 0.05, middle, used, ha="right", va="center", fontsize=8)
