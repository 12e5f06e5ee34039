"""The tables of a sweep on a terminal of 80 columns or more, and what they leave out in words."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from hetero.report.sweep_rows import LEAST_CHANGE, SweepChange, SweepRow

UNKNOWN = "-"


def sweep_table(rows: Sequence[SweepRow], *, title: str) -> Table:
    """One row per combination; columns that would be empty are left out."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("cluster", "model"):
        table.add_column(name, overflow="fold")
    priced = any(row.cost_per_million_tokens is not None for row in rows)
    emulated = any(row.emulated_step_s is not None for row in rows)
    table.add_column("GPUs", justify="right", no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("in")
    names = [
        "s per\nstep",
        "speed-\nup",
        *(["emu-\nlated"] if emulated else []),
        *(["cost/\nMtoken"] if priced else []),
    ]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        goal = "" if row.objective == "time" else f"\n{row.objective}"
        cells = [row.cluster, row.model, f"{row.num_devices}", f"{row.global_batch_size}", f"{row.precision}{goal}"]
        cells += [number(row.step_s, none="no plan"), times(row.speedup)]
        cells += [number(row.emulated_step_s)] if emulated else []
        cells += [number(row.cost_per_million_tokens)] if priced else []
        table.add_row(*cells)
    return table


def number(value: float | None, *, none: str = UNKNOWN) -> str:
    """Four digits, or ``none``."""
    return none if value is None else f"{value:.4g}"


def times(ratio: float | None) -> str:
    """A speed-up with two decimals."""
    return UNKNOWN if ratio is None else f"{ratio:.2f}"


def reasons(rows: Sequence[SweepRow]) -> Mapping[str, str]:
    """By combination, why it has no plan or was not emulated."""
    found = {}
    for row in rows:
        if why := row.why or row.why_not_emulated:
            found[str(row.place)] = why
    return found


def changes_table(changes: Sequence[SweepChange], *, title: str) -> Table:
    """What is different from an earlier sweep."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("combination", overflow="fold")
    for name in ("before", "now"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in changes:
        table.add_row(each.kind, str(each.place), number(each.before_s), number(each.after_s))
    return table


def headline(rows: Sequence[SweepRow]) -> Iterator[str]:
    """What the sweep found, in a few lines."""
    planned = [row for row in rows if row.step_s is not None]
    yield f"{len(planned)} of {len(rows)} combinations have a plan"
    if ratios := sorted(row.speedup for row in planned if row.speedup is not None and row.objective == "time"):
        middle = ratios[len(ratios) // 2]
        yield (
            f"speed-up over the fastest uniform plan: {ratios[0]:.2f} to {ratios[-1]:.2f}, {middle:.2f} in the middle"
        )
        if slower := sum(ratio < 1 - LEAST_CHANGE for ratio in ratios):
            yield f"{slower} of the plans are slower than that one: raise settings.time_limit_s"
    if errors := [abs(row.emulation_error) for row in rows if row.emulation_error is not None]:
        yield f"predictions are {max(errors):z.1%} off the emulated steps at most"
