"""``--report`` and ``--figure`` write the page and the figures of a prediction to files."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import ConfigError
from hetero.report.figure_names import FIGURE_NAMES, OVERVIEW, OVERVIEW_PARTS, FigureName
from hetero.serialization import near_match
from hetero.standard_output import STDOUT, check_output, output_file, write_output

if TYPE_CHECKING:
    from hetero.report.content import Report

PAGE_SUFFIXES = (".html", ".htm")

FIGURE_SUFFIXES = (".svg", ".pdf", ".png")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Files that a command line asks for: a page, and figures by name."""

    page: Path | None
    figures: tuple[tuple[FigureName, Path], ...]

    @property
    def wanted(self) -> bool:
        return self.page is not None or bool(self.figures)

    @property
    def comparison(self) -> bool:
        """Whether any of it shows the yardsticks."""
        return self.page is not None or any(name == "comparison" for name, _ in self.figures)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add ``--report`` and ``--figure``."""
    parser.add_argument(
        "--report",
        type=output_file,
        metavar="OUT.html",
        help="write a page with figures and tables; - for standard output",
    )
    parser.add_argument(
        "--figure",
        type=_figure,
        action="append",
        default=[],
        metavar="[NAME=]OUT.svg",
        help=f"write one figure as .svg, .pdf or .png: {', '.join(FIGURE_NAMES)} (default: {OVERVIEW}, which is "
        f"{' and '.join(OVERVIEW_PARTS)}), - for standard output as SVG; may be repeated",
    )


def outputs(args: argparse.Namespace, *, compares: bool) -> Outputs:
    """What the command line asks for, checked as far as that goes before anything is computed.

    compares: the command can compare a plan with yardsticks.

    Raises:
        ConfigError: an unknown figure, or a file that cannot be written or has another suffix.
    """
    wanted = Outputs(page=args.report, figures=tuple(args.figure))
    if wanted.page is not None:
        check_output(wanted.page, asked_by="--report", suffixes=PAGE_SUFFIXES)
    for name, path in wanted.figures:
        check_output(path, asked_by="--figure", suffixes=FIGURE_SUFFIXES)
        if name == "comparison" and not compares:
            raise ConfigError(f"--figure comparison={path}: only hetero plan compares; leave it out, or plan")
    return wanted


def written(wanted: Outputs, report: "Report") -> Iterator[str]:
    """Write all files, and say so in a line for each.

    Raises:
        ConfigError: a file cannot be written.
    """
    if wanted.page is not None:
        from hetero.report.page.html_page import html_page

        yield f"report written to {write_output(wanted.page, html_page(report).encode('utf-8'))}"
    if wanted.figures:
        from hetero.report.figures.catalogue import figure_bytes

        for name, path in wanted.figures:
            yield f"figure ({name}) written to {write_output(path, figure_bytes(report, name, figure_format(path)))}"


def figure_format(path: Path) -> str:
    """``svg``, ``pdf`` or ``png``, by the name of the file; standard output takes text."""
    return "svg" if path == STDOUT else path.suffix[1:].lower()


def _figure(text: str) -> tuple[FigureName, Path]:
    """``timeline=out.svg``, or ``out.svg`` for the overview."""
    name, separator, path = text.partition("=")
    if not separator:
        return OVERVIEW, Path(text)
    for known in FIGURE_NAMES:
        if name == known:
            return known, Path(path)
    hint = near_match(name, list(FIGURE_NAMES))
    raise ConfigError(f"--figure {text}: {name!r} must be one of {', '.join(FIGURE_NAMES)}{hint}")
