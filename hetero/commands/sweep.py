"""``hetero sweep`` plans many combinations of clusters, models, batches and goals, and shows them together."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from hetero.command_line import COUNT
from hetero.commands.sweep_plans import Say, check_mode, emulate_rows, write_jobs
from hetero.console import console
from hetero.data.presets import cluster_origins, is_name, preset_names, preset_path
from hetero.errors import ConfigError
from hetero.extras import is_installed, pip_install
from hetero.output_files import write_bytes
from hetero.report.sweep_rows import SweepResult, SweepRow, changes
from hetero.report.tables.sweep import changes_table, headline, reasons, sweep_table
from hetero.serialization import load
from hetero.standard_output import answer
from hetero.sweep.combinations import Combination, read_sweep
from hetero.sweep.folder import SweepFolder
from hetero.sweep.run import SweepStatus, run_sweep
from hetero.sweep.sweep_file import SweepSpec
from hetero.version import VERSION

MODES = ("simulate", "emulate", "scripts", "submit")

INTERRUPTED = 130
"""Exit code of a sweep that Ctrl-C ended, as shells have it."""


def add_sweep(commands: Any) -> None:
    """Add the parser of ``hetero sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="plan many combinations of clusters, models and batches",
        description="Plan all combinations of a sweep file. Outcomes are stored as they come: the same command goes on "
        "where it was stopped. docs/sweeps.md tells more.",
    )
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="a sweep file, or the name of one that ships")
    parser.add_argument("--presets", action="store_true", help="list the clusters, models and sweeps that ship")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: sweep-NAME")
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="simulate",
        help="plan and simulate; emulate the plans here as well; write a batch script for each; or submit these to "
        "Slurm (default: %(default)s)",
    )
    parser.add_argument(
        "--jobs", type=COUNT, metavar="N", help="so many are planned at a time (default: one per processor)"
    )
    parser.add_argument("--fresh", action="store_true", help="plan everything again, whatever is stored")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="of an earlier sweep: say what is different")
    parser.set_defaults(run=_sweep)


def _sweep(args: argparse.Namespace) -> int:
    if args.presets:
        return _list_presets(args)
    if args.sweep is None:
        raise ConfigError("sweep: give a sweep file, or the name of one that ships; --presets lists those")
    path = preset_path("sweep", args.sweep) if is_name(args.sweep) else Path(args.sweep)
    spec, combinations = read_sweep(path)
    check_mode(args.mode, spec, combinations, path)
    earlier = None if args.compare is None else _earlier(args.compare)
    folder = SweepFolder(Path(f"sweep-{path.stem}") if args.out is None else args.out)
    say: Say = partial(print, file=sys.stderr, flush=True)
    try:
        rows = _rows(args, spec, combinations, folder, say)
    except KeyboardInterrupt:
        done = sum(folder.row(each.key) is not None for each in combinations)
        say(f"stopped with {done} of {len(combinations)} planned; the same command goes on from there")
        return INTERRUPTED
    result = SweepResult(title=spec.title or path.stem, mode=args.mode, version=VERSION, rows=rows)
    _print(args, result, earlier)
    _write(args, result, earlier, folder)
    return 0


def _rows(
    args: argparse.Namespace, spec: SweepSpec, combinations: Sequence[Combination], folder: SweepFolder, say: Say
) -> tuple[SweepRow, ...]:
    jobs = args.jobs or len(os.sched_getaffinity(0))
    rows = run_sweep(combinations, folder, jobs=jobs, fresh=args.fresh, report=partial(_progress, say))
    if args.mode == "emulate":
        rows = emulate_rows(rows, combinations, folder, spec.emulation, say)
    if args.mode in ("scripts", "submit"):
        assert spec.launch is not None, "check_mode asks for it"
        rows = write_jobs(rows, combinations, folder, spec.launch, submits=args.mode == "submit", say=say)
    return rows


def _progress(say: Say, status: SweepStatus) -> None:
    row = status.row
    took = "no plan" if row.step_s is None else f"{row.step_s:.4g} s per step"
    ratio = "" if row.speedup is None else f", speed-up {row.speedup:.2f}"
    end = ""
    if status.left_s:
        at = time.strftime("%H:%M:%S", time.localtime(time.time() + status.left_s))
        end = f"; about {status.left_s:.0f} s left, until {at}"
    say(f"[{status.done}/{status.total}] {row.place}: {took}{ratio}{end}")


def _earlier(folder: Path) -> SweepResult:
    path = folder / "sweep.json"
    if not path.exists():
        raise ConfigError(f"--compare {folder}: it has no sweep.json; give the folder of a sweep that came to its end")
    return load(SweepResult, path)


def _print(args: argparse.Namespace, result: SweepResult, earlier: SweepResult | None) -> None:
    out = console()
    out.print(sweep_table(result.rows, title=result.title))
    for line in headline(result.rows):
        print(line)
    if earlier is not None:
        if found := changes(earlier.rows, result.rows):
            out.print(changes_table(found, title=f"Since {args.compare}"))
        else:
            print(f"nothing differs from {args.compare}")
    for place, why in reasons(result.rows).items():
        print(f"{place}: {why}")
    answer(args, lambda: result)


def _write(args: argparse.Namespace, result: SweepResult, earlier: SweepResult | None, folder: SweepFolder) -> None:
    # matplotlib takes a second to load; a file that is wrong is told before.
    from hetero.report.page.sweep_page import sweep_page

    written = folder.write_tables(result)
    page = folder.path / "sweep.html"
    html = sweep_page(
        result,
        origins=_origins(),
        changes=() if earlier is None else changes(earlier.rows, result.rows),
        compared_with="" if earlier is None else str(args.compare),
    )
    write_bytes(page, html.encode("utf-8"))
    print(f"written to {', '.join(map(str, [*written, page]))}")
    if not is_installed("pyarrow"):
        print(f"no Parquet: pyarrow is not installed; run: {pip_install('sweep')}")


def _origins() -> Mapping[str, str]:
    """Where clusters are from, in a sentence or two."""
    found = {}
    for name, each in cluster_origins().items():
        shown = f"{each.about}. " + (
            f"An example: {each.source} ({each.date})."
            if each.published == "nothing"
            else f"Published are its {each.published}: {each.source} ({each.date})."
        )
        found[name] = shown + (f" Prices: {each.prices}." if each.prices else "")
    return found


def _presets_table() -> Table:
    """The shipped clusters."""
    table = Table(title="Clusters", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("name", overflow="fold")
    table.add_column("where it is from", overflow="fold")
    for name, origin in _origins().items():
        table.add_row(name, origin)
    return table


def _list_presets(args: argparse.Namespace) -> int:
    origins, models, sweeps = _origins(), preset_names("model"), preset_names("sweep")
    folder = preset_path("sweep", sweeps[0]).parents[1]
    console().print(_presets_table())
    print(f"models: {', '.join(models)}")
    print(f"sweeps: {', '.join(sweeps)}")
    print(f"they lie in {folder}")
    answer(args, lambda: {"clusters": origins, "models": models, "sweeps": sweeps, "folder": folder})
    return 0
