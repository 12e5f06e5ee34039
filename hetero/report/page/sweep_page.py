"""Renders a sweep as one HTML page that loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from hetero.report.figures.canvas import Drawing, inline_svg
from hetero.report.figures.sweep import cost_drawing, emulation_drawing, speedup_drawing
from hetero.report.page.template import rendered
from hetero.report.sweep_rows import SweepChange, SweepResult, SweepRow
from hetero.report.tables.sweep import UNKNOWN, number, reasons, times

MOST_TABLE_ROWS = 1000


def sweep_page(
    result: SweepResult,
    *,
    origins: Mapping[str, str],
    changes: Sequence[SweepChange] = (),
    compared_with: str = "",
) -> str:
    """The HTML of a sweep's page. The same sweep gives the same text.

    origins: where clusters are from, by name; clusters without one are the user's own.
    compared_with: what the other sweep is called; empty if there is none.
    """
    rows = result.rows[:MOST_TABLE_ROWS]
    priced = any(row.cost_per_million_tokens is not None for row in rows)
    emulated = any(row.emulated_step_s is not None for row in rows)
    return rendered(
        "sweep.html.j2",
        title=result.title,
        lede=_lede(result),
        tiles=list(_tiles(result.rows)),
        warning=_warning(result.rows),
        figures=list(_figures(result.rows)),
        rows=[_row(row) for row in rows],
        rows_left_out=len(result.rows) - len(rows),
        priced=priced,
        emulated=emulated,
        jobs=any(row.job for row in rows),
        reasons=reasons(result.rows),
        changes=[_change(each) for each in changes],
        compared_with=compared_with,
        origins={name: origins[name] for name in dict.fromkeys(row.cluster for row in rows) if name in origins},
        version=result.version,
    )


def _lede(result: SweepResult) -> str:
    rows = result.rows
    counts = {
        "cluster": len({row.cluster for row in rows}),
        "model": len({row.model for row in rows}),
        "precision": len({row.precision for row in rows}),
    }
    parts = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items())
    return f"{len(rows)} combinations of {parts}; batches of {_range([row.global_batch_size for row in rows])} samples."


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _tiles(rows: Sequence[SweepRow]) -> Iterator[dict[str, str]]:
    planned = [row for row in rows if row.step_s is not None]
    yield {
        "name": "With a plan",
        "value": f"{len(planned)} of {len(rows)}",
        "note": "the others say below what was short" if len(planned) < len(rows) else "every combination has one",
    }
    by_time = [row for row in planned if row.speedup is not None and row.objective == "time"]
    if by_time:
        ratios = sorted(row.speedup or 0.0 for row in by_time)
        most = max(by_time, key=lambda row: row.speedup or 0.0)
        yield {
            "name": "Against the best uniform plan",
            "value": f"{ratios[len(ratios) // 2]:.2f} ×",
            "note": f"in the middle; from {ratios[0]:.2f} to {ratios[-1]:.2f} × on {most.cluster}",
        }
    priced = [row for row in planned if row.cost_per_million_tokens is not None]
    if priced:
        cheapest = min(priced, key=lambda row: row.cost_per_million_tokens or 0.0)
        yield {
            "name": "Least cost of a million tokens",
            "value": number(cheapest.cost_per_million_tokens),
            "note": f"{cheapest.place}; models and clusters differ, see the figure",
        }
    if errors := [abs(row.emulation_error) for row in rows if row.emulation_error is not None]:
        yield {
            "name": "Predictions, emulated",
            "value": f"{max(errors):z.1%}",
            "note": f"off at most, of {len(errors)} plans that ran at the pace of their clusters",
        }
    seconds = sum(row.planning_s or 0.0 for row in planned)
    ended = sum(not row.finished for row in planned)
    yield {
        "name": "Planning",
        "value": f"{seconds:,.0f} s",
        "note": f"of all searches together; {ended} of them ended by their time limit",
    }


def _warning(rows: Sequence[SweepRow]) -> str:
    said = "Steps are predicted by simulation, nothing here was measured on devices."
    estimates = sum(row.confidence not in ("", "measured", "interpolated") for row in rows)
    if estimates:
        said += f" {estimates} of {len(rows)} rest on estimates and not on measured profiles; the table says which."
    return said


def _figures(rows: Sequence[SweepRow]) -> Iterator[dict[str, Any]]:
    found: list[tuple[str, str, str, Drawing]] = []
    if any(row.speedup is not None for row in rows):
        found.append(
            (
                "speedups",
                "Against the fastest uniform plan",
                "Both predicted by the same simulator. Uniform plans use all GPUs or those of some node types; plans "
                "that are made for money may be slower than they are.",
                speedup_drawing(rows),
            )
        )
    if any(row.emulated_step_s is not None for row in rows):
        found.append(
            (
                "emulated",
                "Predicted and emulated",
                "Processes on one machine ran these plans at the pace of profiles and links. On the line the two are "
                "equal.",
                emulation_drawing(rows),
            )
        )
    if any(row.cost_per_million_tokens for row in rows):
        found.append(
            (
                "cost",
                "Cost against time",
                "For a million tokens of each combination that has prices above 0, in the currency of its cluster "
                "file; only devices that work are paid for.",
                cost_drawing(rows),
            )
        )
    for name, title, note, drawing in found:
        svg = Markup(inline_svg(drawing, name=name, label=f"{title}. {note}"))
        yield {"name": name, "title": title, "note": note, "svg": svg}


def _row(row: SweepRow) -> dict[str, Any]:
    return {
        "cluster": row.cluster,
        "model": row.model,
        "devices": f"{row.num_devices:,}",
        "batch": f"{row.global_batch_size:,}",
        "how": row.precision if row.objective == "time" else f"{row.precision} by {row.objective}",
        "has_plan": row.step_s is not None,
        "step": number(row.step_s),
        "range": UNKNOWN if row.step_low_s is None else f"{row.step_low_s:.3g} to {row.step_high_s:.3g}",
        "speedup": times(row.speedup),
        "bubble": UNKNOWN if row.bubble_share is None else f"{row.bubble_share:z.0%}",
        "mfu": UNKNOWN if row.mfu is None else f"{row.mfu:z.0%}",
        "gap": UNKNOWN if row.gap is None else f"{row.gap:z.1%}",
        "idle": row.idle_devices,
        "emulated": number(row.emulated_step_s),
        "cost": number(row.cost_per_million_tokens),
        "basis": row.confidence or UNKNOWN,
        "shape": row.shape,
        "job": row.job or UNKNOWN,
        "key": row.key,
    }


def _change(change: SweepChange) -> dict[str, str]:
    ratio = ""
    if change.before_s is not None and change.after_s is not None:
        ratio = f"{change.after_s / change.before_s - 1:+z.1%}"
    return {
        "kind": change.kind,
        "place": str(change.place),
        "before": number(change.before_s),
        "after": number(change.after_s),
        "ratio": ratio,
    }
