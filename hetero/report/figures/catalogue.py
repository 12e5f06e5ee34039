"""The figures by name, and one as a file."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from matplotlib.figure import FigureBase

from hetero.report.content import Report
from hetero.report.figure_names import OVERVIEW, OVERVIEW_PARTS, FigureName
from hetero.report.figures.bars import comparison_drawing, memory_drawing
from hetero.report.figures.canvas import WIDTH_IN, Drawing, axes_in, fitting, render
from hetero.report.figures.cluster import cluster_drawing
from hetero.report.figures.colours import QUIET
from hetero.report.figures.timeline import timeline_drawing
from hetero.report.plan_wording import range_of

DRAWINGS: Mapping[FigureName, Callable[[Report], Drawing]] = MappingProxyType(
    {
        "cluster": cluster_drawing,
        "timeline": timeline_drawing,
        "memory": memory_drawing,
        "comparison": comparison_drawing,
    }
)

HEADLINE_IN, SPACE_IN, MARGIN_IN = 0.62, 0.18, 0.25


def figure_bytes(report: Report, name: FigureName, file_format: str) -> bytes:
    """The file of a figure with a headline over it.

    name: of one of :data:`DRAWINGS`, or the overview.
    file_format: "svg", "pdf" or "png".
    """
    drawings = [headline_drawing(report)]
    for part in OVERVIEW_PARTS if name == OVERVIEW else (name,):
        drawings += [DRAWINGS[part](report), _space()]
    return render(drawings, file_format=file_format, margin_in=MARGIN_IN)


def headline_drawing(report: Report) -> Drawing:
    """What was planned for what, and what it is predicted to take."""
    simulation = report.simulation

    def draw(canvas: FigureBase) -> None:
        axes = axes_in(canvas, HEADLINE_IN, left=0, top=0, width=WIDTH_IN, height=HEADLINE_IN)
        title = fitting([f"{report.model_name} on {report.cluster_name}"], room_in=WIDTH_IN - 0.1, size_pt=12)
        axes.text(0.02, 0.2, title, va="center", fontsize=12, weight="bold")
        facts = (
            f"{simulation.step_s:.4g} s ({range_of(report.certainty.step)}) per step of "
            f"{report.plan.global_batch_size} samples, {simulation.samples_per_s:.4g} samples/s; "
            "simulated, not measured"
        )
        axes.text(0.02, 0.43, facts, va="center", color=QUIET)

    return Drawing(height_in=HEADLINE_IN, draw=draw)


def _space() -> Drawing:
    return Drawing(height_in=SPACE_IN, draw=lambda _: None)
