"""Draws figures with matplotlib and writes them: as SVG for the page, as SVG, PDF or PNG for a file.

Lengths are inches (``_in``) from the top left corner. Every figure is ``WIDTH_IN`` wide and as high as it has to be.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.transforms import Bbox

from hetero.printable import printable_lines
from hetero.report.figures.colours import FAINT, INK, PAPER, QUIET

WIDTH_IN = 12.0

PNG_DOTS_PER_INCH = 160

_STYLE: dict[Any, Any] = {  # Any: its stubs list every setting by name.
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "text.color": INK,
    "text.parse_math": False,  # A dollar sign in a name is a dollar sign.
    "axes.edgecolor": FAINT,
    "axes.labelcolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.linewidth": 0.7,
    "hatch.linewidth": 0.6,
    "hatch.color": "#c293b5",
    "path.simplify": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hetero",
    "pdf.fonttype": 42,
}

_CHARACTER_EM = 0.62
"""Width of a character of the sans-serif that is measured with; most readers' own is narrower."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Something ``height_in`` high that can be drawn on a figure or a part of one."""

    height_in: float
    draw: Callable[[FigureBase], None]


def render(drawings: Sequence[Drawing], *, file_format: str, margin_in: float) -> bytes:
    """``drawings`` one below the other. The same drawings give the same bytes.

    file_format: "svg", "pdf" or "png".
    """
    height_in = sum(drawing.height_in for drawing in drawings)
    # Not "tight", which would give every figure a width of its own.
    outline = Bbox.from_extents(-margin_in, -margin_in, WIDTH_IN + margin_in, height_in + margin_in)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, height_in), facecolor=PAPER)
        parts = figure.subfigures(
            len(drawings), 1, height_ratios=[d.height_in for d in drawings], hspace=0, squeeze=False
        )
        for drawing, part in zip(drawings, parts[:, 0], strict=True):
            drawing.draw(part)
        written = io.BytesIO()
        figure.savefig(
            written,
            format=file_format,
            dpi=PNG_DOTS_PER_INCH,
            bbox_inches=outline,
            metadata=_undated(file_format),
        )
    content = written.getvalue()
    return printable_lines(content.decode("utf-8")).encode("utf-8") if file_format == "svg" else content


def inline_svg(drawing: Drawing, *, name: str, label: str) -> str:
    """An ``<svg>`` element for the middle of a page, as wide as the page lets it be.

    name: that no other figure of the page has.
    label: read out instead of the figure.
    """
    text = render([drawing], file_format="svg", margin_in=0.03).decode("utf-8")
    head, body = re.match(r".*?<svg ([^>]*)>(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]  # matplotlib writes both
    view_box = re.search(r'viewBox="[^"]*"', head).group()  # type: ignore[union-attr]  # matplotlib writes both
    # Several figures share one page, whose ids must differ.
    body = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", body)
    escaped = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'<svg role="img" aria-label="{escaped}" {view_box} xmlns:xlink="http://www.w3.org/1999/xlink">{body}'


def axes_in(
    canvas: FigureBase, height_in: float, *, left: float, top: float, width: float, height: float, bare: bool = True
) -> Axes:
    """Axes at a place in inches on a canvas ``height_in`` high. ``bare`` ones count in inches too, downwards."""
    axes = canvas.add_axes(
        (left / WIDTH_IN, 1 - (top + height) / height_in, width / WIDTH_IN, height / height_in),
    )
    axes.set_facecolor("none")
    if bare:
        axes.set_xlim(left, left + width)
        axes.set_ylim(top + height, top)
        axes.axis("off")
    return axes


def fitting(texts: Sequence[str], *, room_in: float, size_pt: float) -> str:
    """The first of ``texts`` that is not wider than ``room_in``, else the last one cut short."""
    most = int(room_in * 72 / (size_pt * _CHARACTER_EM))
    for text in texts:
        if len(text) <= most:
            return text
    return texts[-1][: most - 1] + "…" if most > 1 else ""


def _undated(file_format: str) -> dict[str, None]:
    """Metadata without the date and the program's address, so that files compare and a page names no other."""
    keys = {
        "svg": ("Date", "Creator", "Format", "Type"),
        "pdf": ("CreationDate", "Creator", "Producer"),
        "png": ("Software",),
    }
    return dict.fromkeys(keys[file_format])
