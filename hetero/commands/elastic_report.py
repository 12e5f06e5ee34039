"""``hetero elastic report``: a page, or a figure, about a run, from the event logs of its agents."""

import argparse
from pathlib import Path
from typing import Any

from hetero.commands.report import FIGURE_SUFFIXES, PAGE_SUFFIXES
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.serialization import check_can_be_written, write_bytes

_ORIGIN = "measured: as the agents noted it, each by the clock of its node"


def add_report(actions: Any) -> None:
    """Add the parser of ``hetero elastic report``."""
    parser = actions.add_parser("report", help="write a page about a run: nodes, steps, plans, recoveries")
    parser.add_argument(
        "logs", type=Path, metavar="LOGS", help="folder with the event logs of all nodes, that agents had as --logs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="OUT.html",
        help=f"page to write, or its figure alone as {', '.join(FIGURE_SUFFIXES)}",
    )
    parser.add_argument("--name", help="of the run, for the reader (default: that of the folder)")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    suffix = args.out.suffix.lower()
    if suffix not in (*PAGE_SUFFIXES, *FIGURE_SUFFIXES):
        known = ", ".join((*PAGE_SUFFIXES, *FIGURE_SUFFIXES))
        raise ConfigError(f"--out {args.out}: ends in {args.out.suffix!r}, must end in one of {known}")
    check_can_be_written(args.out, asked_by="--out")
    require("elastic", asked_by="hetero elastic")
    from hetero.elastic.run_history import read_history
    from hetero.report.figures.elastic_run import elastic_figure_bytes
    from hetero.report.page.elastic_page import elastic_page

    run = read_history(args.logs, name=args.name or args.logs.resolve().name, origin=_ORIGIN)
    if suffix in PAGE_SUFFIXES:
        write_bytes(args.out, elastic_page(run).encode("utf-8"))
        print(f"report written to {args.out}")
    else:
        write_bytes(args.out, elastic_figure_bytes(run, suffix[1:]))
        print(f"figure written to {args.out}")
    return 0
