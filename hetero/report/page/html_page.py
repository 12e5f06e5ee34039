"""Renders a report as one HTML page that loads nothing: inline figures, tables, and where the numbers come from."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from hetero.cost.capacity import memory_error
from hetero.cost.layers.confidence import Confidence
from hetero.cost.measured_utilization import utilization_warnings
from hetero.cost.model_flops import overall_mfu
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.ir import Stage
from hetero.planner.reference.yardsticks import Yardstick
from hetero.report.content import DeviceRow, Execution, Report, named
from hetero.report.figure_names import FigureName
from hetero.report.figures.canvas import inline_svg
from hetero.report.figures.catalogue import DRAWINGS
from hetero.report.figures.colours import BACKWARD, COLOURS, UPDATE, WAIT, device_colour, stage_colour
from hetero.report.figures.timeline import is_cut
from hetero.report.launch_lines import launch_lines
from hetero.report.page.template import rendered
from hetero.report.plan_wording import (
    depth_of,
    depth_title,
    device_of,
    gradient_sync_of,
    held_by,
    in_turns,
    orders_of,
    range_of,
    recompute_of,
    shape_of,
)
from hetero.report.tables.certainty import narrows, rival_in_words, utilization_in_words
from hetero.report.tables.host_memory import PARTS as HOST_PARTS
from hetero.report.tables.host_memory import host_memory_rows
from hetero.report.tables.prediction import UNKNOWN, fullest
from hetero.spec.profile import LAYER_KINDS
from hetero.text import number_ranges
from hetero.units import GIB

MOST_TABLE_ROWS = 200

BASIS_WORDS = {
    Confidence.MEASURED: "measured",
    Confidence.INTERPOLATED: "between measured sizes",
    Confidence.EXTRAPOLATED: "estimate: beyond measured sizes",
    Confidence.ESTIMATED: "estimate: from other layers on this device",
    Confidence.DATA_SHEET: "estimate: from data sheets",
}

SHARES = (
    ("forward and backward", "busy_s", COLOURS[BACKWARD]),
    ("bubble", "bubble_s", "#d3d9e1"),
    ("exposed sync", "sync_s", "#cf9fc2"),
    ("update", "update_s", COLOURS[UPDATE]),
    ("waits after that", "rest_s", COLOURS[WAIT]),
)
"""Where a stage's step goes, by fields of ``StageTimes``."""


def html_page(report: Report) -> str:
    """The HTML of a report's page. The same report gives the same text."""
    rows = report.rows[:MOST_TABLE_ROWS]
    return rendered(
        "page.html.j2",
        depth_title=depth_title(report.plan).split("\n"),
        title=f"{report.model_name} on {report.cluster_name}",
        lede=_lede(report),
        tiles=list(_tiles(report)),
        warning=_warning(report),
        figures=list(_figures(report)),
        memory_parts=[name.replace("_", " ") for name in MemoryBreakdown.__dataclass_fields__],
        hosts=list(host_memory_rows(report.plan, report.cluster)),
        host_parts=HOST_PARTS,
        rows=[_row(report, row) for row in rows],
        rows_left_out=len(report.rows) - len(rows),
        shares=[(name, colour) for name, _, colour in SHARES],
        compared=[_compared(report, each) for each in report.compared],
        executions=[_executed(report, execution) for execution in report.executions],
        idle=number_ranges(report.plan.idle_ranks) or "none",
        sums=gradient_sync_of(report.plan),
        orders=orders_of(report.plan),
        layer_kinds=LAYER_KINDS,
        bases=list(_bases(report)),
        rivals=[rival_in_words(rival) for rival in report.certainty.rivals],
        measurements=list(_measurements(report)),
        range=range_of(report.certainty.step),
        several_devices=len(report.devices) > 1,
        has_uncertain=any(not rival.is_certain for rival in report.rivals),
        launch=launch_lines(report.plan, report.cluster, report.plan_file),
        origin=_origin(report),
        plan_format=report.plan.format_version,
    )


def _lede(report: Report) -> str:
    plan, costs = report.plan, report.costs
    parameters = costs.parameter_counts.of_layers(first_layer=0, end_layer=plan.model.num_layers, tp=1)
    counts = ", ".join(f"{count:,} {device}" for device, count in report.devices.items())
    return (
        f"{_count(parameters)} parameters in {plan.model.num_layers} layers of hidden size "
        f"{plan.model.hidden_size}, sequences of {plan.seq_length:,} tokens, {plan.global_batch_size:,} samples per "
        f"step, {plan.precision}. {report.cluster.num_devices:,} devices: {counts}."
    )


def _tiles(report: Report) -> Iterator[dict[str, str]]:
    """The headline, figure by figure."""
    simulation, plan = report.simulation, report.plan
    yield {
        "name": "Time of a step",
        "value": _seconds(simulation.step_s),
        "note": f"{plan.global_batch_size:,} samples; nine of ten such steps take {range_of(report.certainty.step)} s; "
        f"devices compute nothing for {simulation.bubble_share:z.1%} of it",
    }
    yield {
        "name": "Throughput",
        "value": f"{simulation.tokens_per_s:,.0f}",
        "note": f"tokens per second, or {_rate(simulation.samples_per_s)} samples per second",
    }
    if (best := report.best_uniform()) is not None:
        every = next((each.best for each in report.compared if each.name == "uniform"), None)
        of_all = "; over all GPUs none fits"
        if every is not None:
            of_all = f"; {every.step_s / simulation.step_s:.2f} × over all GPUs" if every is not best[1] else ""
        yield {
            "name": "Against the best uniform plan",
            "value": f"{best[1].step_s / simulation.step_s:.2f} ×",
            "note": f"as long takes a step of “{best[0]}”: {_seconds(best[1].step_s)}{of_all}",
        }
    if report.executions:
        ours, *others = report.executions
        slowest = max(report.executions, key=lambda execution: execution.executed.step_s)
        ratio = slowest.executed.step_s / ours.executed.step_s
        yield {
            "name": "Executed, emulated",
            "value": _seconds(ours.executed.step_s),
            "note": f"{ours.predicted.step_s / ours.executed.step_s - 1:+z.1%} is what the prediction is off"
            + (f"; {ratio:.2f} × faster than “{slowest.name}”, executed alike" if others else ""),
        }
    if (result := report.result) is not None:
        ending = "" if result.finished else ", stopped by its time limit"
        note = "the search found nothing in its time"
        if result.score is not None:
            note = (
                f"by the planner's formula: found {_seconds(result.score.step_s)}, none of its covers by "
                f"{result.num_templates:,} templates below {_seconds(result.bound_s)}{ending}"
            )
        yield {"name": "Bound of the search", "value": f"gap {result.gap:z.1%}", "note": note}
        yield {
            "name": "Bound on any plan",
            "value": f"gap {result.gap_to_any:z.1%}",
            "note": f"no plan whatever is below {_seconds(result.lower_bound_s)} by the simulator",
        }
    if report.utilizations:
        each = "; ".join(utilization_in_words(products, one) for products, one in report.utilizations.items())
        yield {"name": "Model FLOPs utilization", "value": f"{overall_mfu(report.utilizations):z.1%}", "note": each}
    full = fullest(report.memory, plan, report.cluster)
    working = plan.world_size - len(plan.idle_ranks)
    replicas = f"{len(plan.replicas):,} replica{'s' if len(plan.replicas) > 1 else ''}"
    if len(report.groups) < len(plan.replicas):
        replicas += ", all alike" if len(report.groups) == 1 else f" of {len(report.groups)} sorts"
    yield {
        "name": "Devices at work",
        "value": f"{working:,} of {report.cluster.num_devices:,}",
        "note": replicas + (f"; the fullest device is {full} full" if full != UNKNOWN else ""),
    }


def _warning(report: Report) -> str:
    said = [_rests_on(report), *(f"{warning}." for warning in utilization_warnings(report.utilizations))]
    short = memory_error(report.plan, report.cluster, report.costs, report.memory)
    return " ".join([*said, *([f"This plan cannot run as it is: {short}."] if short is not None else [])])


def _rests_on(report: Report) -> str:
    if report.simulation.confidence.is_estimate:
        return "some times rest on estimates and not on measured profiles, see the table at the end."
    return "every layer's time was measured on these devices, or lies between sizes that were."


def _figures(report: Report) -> Iterator[dict[str, Any]]:
    cut = " Its middle, which repeats, is left out." if is_cut(report) else ""
    several = any(replica.is_interleaved for replica in report.plan.replicas)
    turns = " Stages that the same devices hold in turns share a row, the later ones lighter." if several else ""
    sort = "replica" if report.names_each_replica else "group of replicas that are alike"
    boxes = "Nodes as boxes with their devices;"
    small = (
        "Nodes that hold the same are drawn once. s, L, t and d are stage, layers, tp and dp where a box is narrow; "
        "the small numbers are ranks."
    )
    computes = "Computes have the hue of their device type: backwards in full, forwards the lightest."
    notes: dict[FigureName, tuple[str, str]] = {
        "cluster": ("Who holds what", f"{boxes} one hue per {sort}, stages from light to full. {small}"),
        "timeline": (
            "One step",
            f"A row per stage, of the first replica where several are alike.{cut} Numbers are microbatches; below each "
            f"row is what its devices send and sum meanwhile.{turns}",
        ),
        "memory": ("Memory at the peak", "What one device of each stage holds, against what it has."),
        "comparison": (
            "Against other planners",
            "The same cluster planned in other manners, each at its best, by the same simulator and the same memory "
            "check. whale, autohet and harp are readings of published ideas, not their authors' programs.",
        ),
    }
    device_notes: dict[FigureName, str] = {
        "cluster": f"{boxes} one hue per device type. {small}",
        "timeline": f"{notes['timeline'][1]} {computes}",
    }
    for name, (title, note) in notes.items():
        if name != "comparison" or report.others:
            yield _figure(report, name, name=name, title=title, note=note, device_note=device_notes.get(name, note))
    if report.executions:
        ran = dataclasses.replace(report, simulation=report.executions[0].executed)
        title = "The same step as it ran, emulated"
        note = (
            "Processes on one machine really did this, at the pace of profiles and links: computes that slept "
            "until the described device were done, messages and sums that took turns on the described wires."
        )
        yield _figure(ran, "timeline", name="executed", title=title, note=note, device_note=f"{note} {computes}")


def _figure(
    report: Report, drawing: FigureName, *, name: str, title: str, note: str, device_note: str
) -> dict[str, Any]:
    """A figure as the template takes it, a second time by device type where there are several."""

    def svg(drawn: Report, name: str, said: str) -> Markup:
        return Markup(inline_svg(DRAWINGS[drawing](drawn), name=name, label=f"{title}. {said}"))

    is_twice = drawing != "comparison" and len(report.devices) > 1
    by_device = dataclasses.replace(report, colours="device")
    return {
        "name": name,
        "title": title,
        "note": note,
        "svg": svg(report, name, note),
        "device_note": device_note,
        "device_svg": svg(by_device, f"{name}-devices", device_note) if is_twice else None,
    }


def _row(report: Report, row: DeviceRow) -> dict[str, Any]:
    stage, times, step_s = row.stage, row.times, report.simulation.step_s
    ranks = [rank for r in row.members for rank in report.plan.replicas[r].stages[row.index].ranks]
    stages = row.stages
    total_gib = row.memory.total / GIB
    capacity = f"{row.capacity_bytes / GIB:.0f}" if row.capacity_bytes is not None else UNKNOWN
    return {
        "is_first": row.is_first,
        "members": number_ranges(row.members) if len(row.members) < 9 else f"{len(row.members)} alike",
        "samples": row.replica.num_samples,
        "stage": number_ranges(row.indices),
        "colour": stage_colour(report, row.members[0], row.place, stage.device),
        "device_colour": device_colour(report, stage.device),
        "layers": in_turns(held_by(report.plan, each) for each in stages),
        "device": device_of(stage),
        "ranks": named("rank", sorted(ranks)).removeprefix("ranks ").removeprefix("rank "),
        "all_ranks": number_ranges(sorted(ranks)),
        "tp": stage.tp,
        "dp": stage.dp,
        "sp": "yes" if stage.splits_sequence else "-",
        "micro_batch_size": stage.micro_batch_size,
        "microbatches": row.num_microbatches,
        "in_flight": " | ".join(map(depth_of, stages)),
        "recompute": in_turns(map(recompute_of, stages)),
        "busy": f"{times.busy_s / step_s:z.0%}",
        "bubble": f"{times.bubble_s / step_s:z.0%}",
        "sync": f"{times.sync_s / step_s:z.0%}",
        "bar": [(round(100 * getattr(times, field) / step_s, 2), colour) for _, field, colour in SHARES],
        "memory_gib": [f"{num_bytes / GIB:.2f}" for num_bytes in row.memory.named().values()],
        "total_gib": f"{total_gib:.2f}",
        "used": f"{total_gib:.1f} of {capacity}",
    }


def _compared(report: Report, yardstick: Yardstick) -> dict[str, Any]:
    if (best := yardstick.best) is None:
        return {"name": yardstick.name, "why_none": yardstick.why_none}
    uncertain = {rival.name for rival in report.rivals if not rival.is_certain}
    return {
        "name": yardstick.name,
        "why_none": "",
        "step": f"{best.step_s:.4g}",
        "samples": _rate(best.simulation.samples_per_s),
        "times": f"{best.step_s / report.simulation.step_s:.2f} ×{' ?' if yardstick.name in uncertain else ''}",
        "bubble": f"{best.simulation.bubble_share:z.0%}",
        "memory": fullest(best.memory, best.plan, report.cluster),
        "idle": len(best.plan.idle_ranks),
        "shape": shape_of(best.plan),
    }


def _executed(report: Report, execution: Execution) -> dict[str, Any]:
    predicted_s, executed_s = execution.predicted.step_s, execution.executed.step_s
    first, last = execution.losses[0], execution.losses[-1]
    return {
        "name": execution.name,
        "predicted": f"{predicted_s:.4g}",
        "executed": f"{executed_s:.4g}",
        "error": f"{predicted_s / executed_s - 1:+z.2%}",
        "times": f"{executed_s / report.executions[0].executed.step_s:.2f} ×",
        "losses": f"{first:.6f} to {last:.6f}",
    }


def _measurements(report: Report) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What to measure, with the lines to type as far as they are known."""
    known = itertools.chain(report.commands, itertools.repeat(()))
    for measurement, commands in zip(report.certainty.measurements, known, strict=False):
        yield narrows(measurement, report.certainty.step), commands


def _bases(report: Report) -> Iterator[dict[str, Any]]:
    """What each device's times rest on, at the tp and microbatch size that the plan uses."""
    costs = report.costs
    uses = dict.fromkeys(_use(row.stage) for row in report.rows)
    for device, tp, micro_batch_size, fp8 in uses:
        held = {
            kind
            for row in report.rows
            if _use(row.stage) == (device, tp, micro_batch_size, fp8)
            for kind in LAYER_KINDS
            if kind == "block"
            or (kind == "embedding" and row.stage.start == 0)
            or (kind == "head" and row.stages[-1].end == report.plan.model.num_layers)
        }
        profile = costs.profile_of(device)
        told = "none of this model's layers"
        if profile is not None:
            told = f"{profile.model}, {profile.arithmetic}, by {profile.provenance.measured_by}"
        yield {
            "device": device + (" fp8" if fp8 else ""),
            "tp": tp,
            "micro_batch_size": micro_batch_size,
            "layers": [
                BASIS_WORDS[
                    costs.layer(kind, device=device, tp=tp, micro_batch_size=micro_batch_size, fp8=fp8).confidence
                ]
                if kind in held
                else "-"
                for kind in LAYER_KINDS
            ],
            "update_basis": BASIS_WORDS[costs.update("block", device=device, tp=tp)[1]],
            "profile": told,
        }


def _use(stage: Stage) -> tuple[str, int, int, bool]:
    """What a layer's time depends on beside its shape."""
    return stage.device, stage.tp, stage.micro_batch_size, stage.fp8


def _origin(report: Report) -> str:
    links = "Bandwidths and latencies are those of the cluster's file."
    memory = "Memory is computed part by part by the cost model."
    if report.result is None:
        return f"Made by hetero simulate. {links} {memory}"
    return f"Made by hetero plan in {report.result.planning_s:.1f} s of planning. {links} {memory}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1000 * seconds:.4g} ms"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def _count(number: int) -> str:
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
