"""An elastic run as it went: a row per node with what it was when, and below them the steps."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.patches import Patch, Rectangle

from hetero.report.elastic_run import NODE_STATES, ElasticRun, EpochHistory, NodeState
from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting, render
from hetero.report.figures.colours import FAINT, INK, QUIET

LABEL_IN, ROW_IN, HEAD_IN, STEPS_IN, GAP_IN, AXIS_IN, LEGEND_IN, TITLE_IN = 1.5, 0.3, 0.24, 2.1, 0.12, 0.42, 0.3, 0.62

MOST_NODES = 40
"""So many rows are drawn."""

STATE_COLOURS: dict[NodeState, str] = {
    "training": "#3f9c7c",
    "present": "#eec373",
    "idle": "#ccd3dc",
    "lost": "#f6e3e0",
}

_HATCHES: dict[NodeState, str] = {"lost": "////"}
_HATCH = "#c98f86"
_STEP, _COMMITTED, _PUBLISHED = "#1f5f99", "#c1501f", INK


def elastic_drawing(run: ElasticRun) -> Drawing:
    """Nodes over time, epochs by number, steps done and committed."""
    nodes = run.nodes[:MOST_NODES]
    lanes_in = ROW_IN * len(nodes)
    steps_top = HEAD_IN + lanes_in + GAP_IN
    height_in = steps_top + STEPS_IN + AXIS_IN + LEGEND_IN
    width = WIDTH_IN - LABEL_IN - 0.15

    def draw(canvas: FigureBase) -> None:
        labels = axes_in(canvas, height_in, left=0, top=0, width=WIDTH_IN, height=height_in)
        for i, node in enumerate(nodes):
            middle = HEAD_IN + ROW_IN * (i + 0.5)
            labels.text(0.05, middle, fitting([node], room_in=LABEL_IN - 0.15, size_pt=8), va="center", fontsize=8)
        if len(run.nodes) > len(nodes):
            labels.text(0.05, 0.1, f"{len(run.nodes) - len(nodes)} more nodes", va="center", color=QUIET, fontsize=7)
        lanes = axes_in(canvas, height_in, left=LABEL_IN, top=HEAD_IN, width=width, height=lanes_in, bare=False)
        _draw_lanes(lanes, run, nodes)
        steps = axes_in(canvas, height_in, left=LABEL_IN, top=steps_top, width=width, height=STEPS_IN, bare=False)
        _draw_steps(steps, run)
        _number_epochs(labels, run, width / max(run.seconds, 1e-9))
        _legend(labels, run)

    return Drawing(height_in=height_in, draw=draw)


def elastic_figure_bytes(run: ElasticRun, file_format: str) -> bytes:
    """The file of the figure with a headline over it; ``file_format`` is "svg", "pdf" or "png"."""

    def headline(canvas: FigureBase) -> None:
        axes = axes_in(canvas, TITLE_IN, left=0, top=0, width=WIDTH_IN, height=TITLE_IN)
        title = fitting([run.name], room_in=WIDTH_IN - 0.1, size_pt=12)
        axes.text(0.02, 0.18, title, va="center", fontsize=12, weight="bold")
        axes.text(0.02, 0.42, run.origin, va="center", color=QUIET)

    drawings = [Drawing(height_in=TITLE_IN, draw=headline), elastic_drawing(run)]
    return render(drawings, file_format=file_format, margin_in=0.25)


def _draw_lanes(axes: Axes, run: ElasticRun, nodes: Sequence[str]) -> None:
    _bare(axes, run)
    axes.set_ylim(len(nodes), 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    for span in run.spans:
        if span.node in nodes:
            corner = span.start_s, nodes.index(span.node) + 0.16
            hatch = _HATCHES.get(span.state)
            axes.add_patch(
                Rectangle(
                    corner, span.end_s - span.start_s, 0.68, facecolor=STATE_COLOURS[span.state],
                    edgecolor=_HATCH if hatch else "none", hatch=hatch, linewidth=0,
                )
            )  # fmt: skip
    for epoch in run.epochs[1:]:
        axes.axvline(epoch.begin_s, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))


def _draw_steps(axes: Axes, run: ElasticRun) -> None:
    _bare(axes, run)
    axes.spines["left"].set_visible(True)
    axes.set_ylim(0, 1.08 * max((epoch.last_step for epoch in run.epochs), default=1) or 1)
    axes.set_ylabel("step", fontsize=7.5)
    axes.set_xlabel("seconds", fontsize=7.5, loc="left")
    axes.tick_params(length=3, labelsize=7.5)
    axes.grid(True, color=FAINT, linewidth=0.5)
    axes.set_axisbelow(True)
    for epoch in run.epochs:
        if epoch.first_step_s is None:
            continue
        points = _points(epoch)
        axes.plot(*zip(*points, strict=True), color=_STEP, linewidth=1.6)
        done = [each for each in epoch.progress if each.committed > 0]
        if done:
            times = [*(each.time_s for each in done), epoch.end_s]
            steps = [*(each.committed for each in done), done[-1].committed]
            axes.step(times, steps, where="post", color=_COMMITTED, linewidth=1.0)
    _draw_published(axes, run)
    for change in run.changes:
        if change.repeated:
            before, after = (epoch for epoch in run.epochs if epoch.number in (change.epoch - 1, change.epoch))
            axes.plot([before.end_s] * 2, [before.last_step, after.start_step], color=_STEP, linewidth=1.6)
            axes.annotate(
                f"{change.repeated} step{'s' if change.repeated > 1 else ''} again",
                (after.begin_s, 1), (-2, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="right", va="top", rotation=90, fontsize=6.5, color=QUIET,
            )  # fmt: skip
    for epoch in run.epochs[1:]:
        axes.axvline(epoch.begin_s, color=INK, linewidth=0.6, linestyle=(0, (2, 2)))


def _draw_published(axes: Axes, run: ElasticRun) -> None:
    if run.published:
        times, steps = zip(*run.published, strict=True)
        axes.plot(times, steps, marker="^", color=_PUBLISHED, linestyle="none", markersize=4)


def _points(epoch: EpochHistory) -> list[tuple[float, int]]:
    assert epoch.first_step_s is not None, "has none to draw"
    known = [(each.time_s, each.step) for each in epoch.progress if each.time_s <= epoch.end_s]
    return [*known, (epoch.end_s, epoch.last_step)]


def _number_epochs(axes: Axes, run: ElasticRun, in_per_s: float) -> None:
    """Over the rows, where there is room."""
    for epoch in run.epochs:
        room = (epoch.end_s - epoch.begin_s) * in_per_s
        texts = [f"epoch {epoch.number}, {len(epoch.nodes)} nodes", f"epoch {epoch.number}", str(epoch.number)]
        axes.text(
            LABEL_IN + epoch.begin_s * in_per_s + 0.03, HEAD_IN / 2, fitting(texts, room_in=room, size_pt=7),
            va="center", fontsize=7, color=QUIET,
        )  # fmt: skip


def _legend(axes: Axes, run: ElasticRun) -> None:
    handles: list[object] = [
        Patch(
            facecolor=STATE_COLOURS[state], label=state, hatch=_HATCHES.get(state), linewidth=0,
            edgecolor=_HATCH if state in _HATCHES else "none",
        )
        for state in NODE_STATES
    ]  # fmt: skip
    handles += axes.plot([], [], color=_STEP, linewidth=1.6, label="steps done")
    handles += axes.plot([], [], color=_COMMITTED, linewidth=1.0, label="committed")
    if run.published:
        handles += axes.plot([], [], marker="^", color=_PUBLISHED, linestyle="none", markersize=4, label="in the store")
    handles += axes.plot([], [], color=INK, linewidth=0.6, linestyle=(0, (2, 2)), label="a new epoch")
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 0), bbox_transform=axes.transAxes, ncols=len(handles),
        frameon=False, fontsize=7.5, handlelength=1.3, handleheight=0.9, columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip


def _bare(axes: Axes, run: ElasticRun) -> None:
    axes.set_xlim(0, max(run.seconds, 1e-9))
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
