"""Renders the history of an elastic run as one HTML page that loads nothing."""

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from hetero.report.elastic_run import ChangeOfNodes, ElasticRun, EpochHistory
from hetero.report.figures.canvas import inline_svg
from hetero.report.figures.elastic_run import elastic_drawing
from hetero.report.page.template import rendered

MOST_NOTES = 200

_NONE = "-"

_NOTE = (
    "A row per node: training; present while nobody trains, as between two epochs; idle while others train; lost when "
    "it went without a word. Below, the steps that were done and those that were committed, as agents noted them from "
    "time to time. A fall is what had to be done again."
)


def elastic_page(run: ElasticRun) -> str:
    """The HTML of a run's page. The same run gives the same text."""
    label = f"Nodes and steps over time. {_NOTE}"
    phases = run.phases()
    return rendered(
        "elastic.html.j2",
        run=run,
        lede=_lede(run),
        tiles=list(_tiles(run)),
        note=_NOTE,
        svg=Markup(inline_svg(elastic_drawing(run), name="timeline", label=label)),
        epochs=[_epoch(epoch) for epoch in run.epochs],
        phases=phases,
        changes=[_change(change, phases) for change in run.changes],
        notes=run.notes[:MOST_NOTES],
        notes_left_out=max(0, len(run.notes) - MOST_NOTES),
    )


def _lede(run: ElasticRun) -> str:
    ending = f" The end: {run.ending}." if run.ending else " No log says how it ended."
    return f"{_count(len(run.nodes), 'node')}, {_count(len(run.epochs), 'epoch')}, {run.seconds:,.1f} s.{ending}"


def _tiles(run: ElasticRun) -> Iterator[dict[str, str]]:
    losses = [change for change in run.changes if change.is_loss]
    planned = len(run.changes) - len(losses)
    again = f"; {run.repeated} done twice" if run.repeated else "; none was done twice"
    yield {"name": "Steps", "value": f"{run.steps:,}", "note": f"{run.committed:,} known to be committed{again}"}
    yield {
        "name": "Time spent training",
        "value": f"{run.training_share:z.1%}",
        "note": "of the time from the first step to the end; the rest went into changes of nodes",
    }
    yield {
        "name": "Changes of nodes",
        "value": f"{len(run.changes)}",
        "note": f"{_count(len(losses), 'loss', 'losses')}, {planned} planned",
    }
    if losses:
        slowest = max(losses, key=lambda change: change.seconds)
        yield {
            "name": "Longest recovery",
            "value": f"{slowest.seconds:.2f} s",
            "note": f"from the notice of the loss to the first step of epoch {slowest.epoch}",
        }


def _epoch(epoch: EpochHistory) -> dict[str, Any]:
    first_step_s = epoch.first_step_s
    return {
        "number": epoch.number,
        "begin": f"{epoch.begin_s:.1f}",
        "trained": _NONE if first_step_s is None else f"{epoch.end_s - first_step_s:.1f}",
        "start": epoch.start_step,
        "last": epoch.last_step,
        "committed": max((each.committed for each in epoch.progress), default=0) or _NONE,
        "step": _NONE if (step_s := epoch.step_s) is None else f"{step_s:.4g}",
        "nodes": ", ".join(epoch.nodes),
        "plan": epoch.plan or _NONE,
        "reason": epoch.reason,
    }


def _change(change: ChangeOfNodes, phases: Any) -> dict[str, Any]:
    return {
        "epoch": change.epoch,
        "what": "loss" if change.is_loss else "planned",
        "phases": [f"{change.phases[phase]:.2f}" if phase in change.phases else _NONE for phase in phases],
        "seconds": f"{change.seconds:.2f}",
        "repeated": change.repeated or _NONE,
        "reason": change.reason,
    }


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
