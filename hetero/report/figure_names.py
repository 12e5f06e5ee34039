"""Names the figures of a report, for those who ask for one and those who draw it."""

from typing import Final, Literal, get_args

FigureName = Literal["overview", "cluster", "timeline", "memory", "comparison"]

FIGURE_NAMES: tuple[FigureName, ...] = get_args(FigureName)

OVERVIEW: Final = "overview"

OVERVIEW_PARTS: tuple[FigureName, ...] = ("cluster", "timeline")
"""What the overview shows, one below the other."""
