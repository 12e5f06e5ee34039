"""``hetero elastic report``: a page, or a figure, about a run, from the event logs of its agents."""

import argparse
from pathlib import Path
from typing import Any

from hetero.commands.report import FIGURE_SUFFIXES, PAGE_SUFFIXES, figure_format
from hetero.extras import require
from hetero.standard_output import STDOUT, answer, check_output, output_file, write_output

_ORIGIN = "measured: as the agents noted it, each by the clock of its node"


def add_report(actions: Any) -> None:
    """Add the parser of ``hetero elastic report``."""
    parser = actions.add_parser("report", help="write a page about a run: nodes, steps, plans, recoveries")
    parser.add_argument(
        "logs", type=Path, metavar="LOGS", help="folder with the event logs of all nodes, that agents had as --logs"
    )
    parser.add_argument(
        "--out",
        type=output_file,
        required=True,
        metavar="OUT.html",
        help=f"page to write, - for standard output; or its figure alone as {', '.join(FIGURE_SUFFIXES)}",
    )
    parser.add_argument("--name", help="of the run, for the reader (default: that of the folder)")
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    check_output(args.out, asked_by="--out", suffixes=(*PAGE_SUFFIXES, *FIGURE_SUFFIXES))
    require("elastic", asked_by="hetero elastic")
    from hetero.elastic.run_history import read_history
    from hetero.report.figures.elastic_run import elastic_figure_bytes
    from hetero.report.page.elastic_page import elastic_page

    run = read_history(args.logs, name=args.name or args.logs.resolve().name, origin=_ORIGIN)
    is_page = args.out == STDOUT or args.out.suffix.lower() in PAGE_SUFFIXES
    content = elastic_page(run).encode("utf-8") if is_page else elastic_figure_bytes(run, figure_format(args.out))
    where = write_output(args.out, content)
    print(f"{'report' if is_page else 'figure'} written to {where}")
    answer(args, lambda: {"written_to": where, "run": run})
    return 0
