"""Figures of a sweep: speed-ups by cluster, predictions beside emulated steps, and cost against time."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting
from hetero.report.figures.colours import FAINT, HUES, INK, PAPER, QUIET
from hetero.report.sweep_rows import SweepRow

MOST_BARS = 60

HEAD_IN, ROW_IN, AXIS_IN = 0.34, 0.26, 0.45
NAME_IN, VALUE_IN = 2.8, 0.8

SCATTER_IN, SIDE_IN = 4.6, 0.75
KEY_IN = 3.3
"""Room to the right of the points for the names of their colours."""

ROUND_UP = 1.06


def speedup_drawing(rows: Sequence[SweepRow]) -> Drawing:
    """How many times as long the best uniform plan takes: bars by cluster, with a line where the two are equal."""
    shown = [row for row in rows if row.speedup is not None]
    drawn = shown[:MOST_BARS]
    groups = {
        name: [row for row in drawn if row.cluster == name] for name in dict.fromkeys(row.cluster for row in drawn)
    }
    bottom = len(groups) * HEAD_IN + len(drawn) * ROW_IN
    height_in = bottom + AXIS_IN + (0.2 if len(shown) > len(drawn) else 0.0)
    longest = ROUND_UP * max(1.0, *(row.speedup or 0.0 for row in drawn))
    colours = _colours(rows)

    def draw(canvas: FigureBase) -> None:
        page = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        width = WIDTH_IN - NAME_IN - VALUE_IN
        bars = axes_in(canvas, height_in, left=NAME_IN, top=0, width=width, height=bottom, bare=False)
        bars.set_xlim(0, longest)
        bars.set_ylim(bottom, 0)
        bars.set_yticks([])
        bars.set_xlabel("steps of the fastest uniform plan in the time of one of the plan", fontsize=7.5, loc="left")
        _quiet(bars, "left", "right", "top")
        top = 0.0
        for name, members in groups.items():
            title = fitting([name], room_in=NAME_IN, size_pt=8.5)
            page.text(0.03, top + 0.6 * HEAD_IN, title, va="center", fontsize=8.5, weight="bold")
            top += HEAD_IN
            for row in members:
                _draw_bar(page, bars, row, top, colours[row.cluster], width / longest)
                top += ROW_IN
        bars.axvline(1.0, color=INK, linewidth=1.0)
        if len(shown) > len(drawn):
            note = f"{len(shown) - len(drawn)} more are not drawn; the table has them"
            page.text(0.03, height_in - 0.1, note, color=QUIET, va="center")

    return Drawing(height_in=height_in, draw=draw)


def _draw_bar(page: Axes, bars: Axes, row: SweepRow, top: float, colour: str, in_per_unit: float) -> None:
    assert row.speedup is not None, "only such rows are drawn"
    middle = top + ROW_IN / 2
    goal = "" if row.objective == "time" else f", by {row.objective}"
    text = fitting(
        [f"{row.model}, batch {row.global_batch_size}, {row.precision}{goal}"], room_in=NAME_IN - 0.3, size_pt=8
    )
    page.text(NAME_IN - 0.1, middle, text, ha="right", va="center", fontsize=8)
    bars.add_patch(Rectangle((0, middle - 0.3 * ROW_IN), row.speedup, 0.6 * ROW_IN, facecolor=colour))
    # Beside the line, not on it.
    end = max(1.0, row.speedup)
    page.text(NAME_IN + in_per_unit * end + 0.07, middle, f"{row.speedup:.2f} ×", va="center", fontsize=8)


def emulation_drawing(rows: Sequence[SweepRow]) -> Drawing:
    """Predicted seconds of a step against emulated ones, with a line where they are equal."""
    shown = [row for row in rows if row.emulated_step_s is not None]

    def draw(axes: Axes) -> None:
        values = [each for row in shown for each in (row.step_s, row.emulated_step_s) if each is not None]
        ends = [min(values) / 1.3, max(values) * 1.3]
        axes.plot(ends, ends, color=FAINT, linewidth=1.2, zorder=1)
        axes.set_xlim(*ends)
        axes.set_ylim(*ends)

    return _scatter(
        shown,
        at=lambda row: (row.emulated_step_s or 0.0, row.step_s or 0.0),
        labels=("emulated seconds of a step", "predicted"),
        more=draw,
    )


def cost_drawing(rows: Sequence[SweepRow]) -> Drawing:
    """Cost of a million tokens against the seconds that they take; what is left and low is better.

    Tokens that cost nothing are left out: logarithmic axes have no place for 0.
    """
    shown = [row for row in rows if row.cost_per_million_tokens]
    return _scatter(
        shown,
        at=lambda row: (row.s_per_million_tokens or 0.0, row.cost_per_million_tokens or 0.0),
        labels=("seconds for a million tokens", "cost of a million tokens"),
    )


def _scatter(
    rows: Sequence[SweepRow],
    *,
    at: Callable[[SweepRow], tuple[float, float]],
    labels: tuple[str, str],
    more: Callable[[Axes], None] | None = None,
) -> Drawing:
    """A point for each row on logarithmic axes, coloured by its cluster; numbers are those of a list beside it."""
    clusters = list(dict.fromkeys(row.cluster for row in rows))
    colours = _colours(rows)
    key_rows = len(rows) + len(clusters)
    height_in = max(SCATTER_IN + AXIS_IN, 0.17 * key_rows + 0.2)

    def draw(canvas: FigureBase) -> None:
        page = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        width = WIDTH_IN - SIDE_IN - KEY_IN - 0.3
        axes = axes_in(canvas, height_in, left=SIDE_IN, top=0.1, width=width, height=SCATTER_IN - 0.1, bare=False)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(labels[0], fontsize=7.5, loc="left")
        axes.set_ylabel(labels[1], fontsize=7.5, loc="bottom")
        axes.grid(True, color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        _quiet(axes, "right", "top")
        if more is not None:
            more(axes)
        top, left = 0.2, WIDTH_IN - KEY_IN
        for cluster in clusters:
            page.text(left, top, fitting([cluster], room_in=KEY_IN, size_pt=8), va="center", fontsize=8, weight="bold")
            top += 0.17
            for i, row in enumerate(rows):
                if row.cluster != cluster:
                    continue
                x, y = at(row)
                axes.plot([x], [y], marker="o", markersize=9, color=colours[cluster], markeredgecolor=PAPER)
                axes.text(x, y, f"{i + 1}", ha="center", va="center", fontsize=5.5, color=PAPER, weight="bold")
                goal = "" if row.objective == "time" else f", by {row.objective}"
                text = f"{i + 1}  {row.model}, {row.global_batch_size}, {row.precision}{goal}"
                page.text(left, top, fitting([text], room_in=KEY_IN, size_pt=7.5), va="center", fontsize=7.5)
                page.add_patch(Rectangle((left - 0.16, top - 0.045), 0.09, 0.09, facecolor=colours[cluster]))
                top += 0.17

    return Drawing(height_in=height_in, draw=draw)


def _colours(rows: Sequence[SweepRow]) -> dict[str, str]:
    """A hue for each cluster in the order of the rows; with more clusters than hues they come again."""
    clusters = dict.fromkeys(row.cluster for row in rows)
    return {cluster: HUES[i % len(HUES)] for i, cluster in enumerate(clusters)}


def _quiet(axes: Axes, *sides: str) -> None:
    axes.tick_params(length=3, labelsize=7.5)
    for side in sides:
        axes.spines[side].set_visible(False)
