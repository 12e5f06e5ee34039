"""A step that ran under emulation beside the same step as it was predicted, as a table and in words."""

from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from hetero.cost.simulation.simulator import Simulation
from hetero.cost.simulation.stage_times import StageTimes
from hetero.plan.ir import Plan, StageKey
from hetero.report.plan_wording import device_of, in_turns, layers_of
from hetero.report.tables.fitting_table import FittingTable
from hetero.text import number_ranges

COLUMNS: Mapping[str, Callable[[StageTimes], float]] = {
    "busy": lambda times: times.busy_s,
    "bubble": lambda times: times.bubble_s - times.exposed_s,
    "exposed\ntransfers": lambda times: times.exposed_s,
    "exposed\nsync": lambda times: times.sync_s,
    "update": lambda times: times.update_s,
}
"""Columns of what a stage's seconds go to, each from its times."""


MEASURED_COLUMNS: Mapping[str, Callable[[StageTimes], float]] = {
    "busy": lambda times: times.busy_s,
    "bubble": lambda times: times.bubble_s,
    "exposed\nsync": lambda times: times.sync_s,
    "update": lambda times: times.update_s,
}
"""The same of a step on real devices, where nobody sees which part of a bubble is a transfer."""


def measurement_table(predicted: Simulation, executed: Simulation) -> Table:
    """One row per device group: its seconds as predicted, and as they were under emulation."""
    times = {"predicted": predicted.stages, "executed (emulated)": executed.stages}
    return stage_times_table(predicted.plan, times, COLUMNS)


def stage_times_table(
    plan: Plan,
    times: Mapping[str, Mapping[StageKey, StageTimes]],
    columns: Mapping[str, Callable[[StageTimes], float]],
    *,
    of: str = "a step",
) -> Table:
    """One row per device group: its seconds from each source, side by side.

    Args:
        times: by source, such as ``predicted``, that of each stage.
        of: which step.
    """
    table = FittingTable(title=f"Seconds of {of}, {' | '.join(times)}", keys=2)
    for header in ("replica", "stage"):
        table.add_column(header, justify="right")
    for header in ("layers", "device"):
        table.add_column(header)
    for header in columns:
        table.add_column(header, justify="right")
    for r, replica in enumerate(plan.replicas):
        for group in replica.device_groups:
            s, stages = group[0], [replica.stages[each] for each in group]
            known = [found[r, s] for found in times.values() if (r, s) in found]
            cells = [" | ".join(_nanoseconds(seconds_of(each)) for each in known) for seconds_of in columns.values()]
            layers = in_turns(map(layers_of, stages))
            table.add_row(str(r), number_ranges(group), layers, device_of(stages[0]), *cells)
    return table


def _nanoseconds(seconds: float) -> str:
    """Format seconds without what rounding leaves of differences, such as -1e-17."""
    return f"{round(seconds, 9):z.4g}"


def measurement_lines(
    predicted: Simulation, executed: Simulation, *, time_scale: float, lateness_s: float
) -> Iterator[str]:
    """The step as a whole, in words."""
    error = predicted.step_s / executed.step_s - 1
    yield f"step: predicted {predicted.step_s:.4g} s, executed {executed.step_s:.4g} s (emulated), {error:+z.2%}"
    yield (
        f"emulated on this machine's processor, {time_scale:g} wall seconds per second; it was late by "
        f"{lateness_s * 1e3:.1f} ms of emulated time at most"
    )
