"""Measured weights, gradients and optimizer state beside the predicted bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from hetero.cost.host_memory import HostMemory
from hetero.cost.memory import PlanMemory, device_memory
from hetero.plan.ir import Plan, StageKey
from hetero.report.tables.fitting_table import FittingTable
from hetero.text import number_ranges
from hetero.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticBytes:
    """What a rank holds for the whole run, in bytes; ``host`` is its host's memory, the rest its device's."""

    weights: int
    gradients: int
    optimizer: int
    host: int = 0


def static_memory_table(
    plan: Plan, measured: Sequence[StaticBytes], predicted: PlanMemory, on_hosts: Mapping[StageKey, HostMemory]
) -> Table:
    """Weights, gradients and optimizer state by device group: the largest rank's, beside what was predicted.

    What is on hosts all the time has a column where something is.

    Args:
        measured: by rank, zeros where nothing is held.
        on_hosts: what is predicted to be there.
    """
    is_held = any(each.held for each in on_hosts.values())
    table = FittingTable(title="Memory of one rank, MiB, measured | predicted", keys=2)
    for header in ("replica", "stage"):
        table.add_column(header, justify="right")
    table.add_column("ranks")
    for header in ("weights", "gradients", "optimizer", *(["on the host"] if is_held else [])):
        table.add_column(header, justify="right")
    devices = device_memory(plan, predicted)
    for r, replica in enumerate(plan.replicas):
        for group in replica.device_groups:
            ranks, cells = replica.stages[group[0]].ranks, []
            for part in ("weights", "gradients", "optimizer"):
                largest = max(getattr(measured[rank], part) for rank in ranks)
                cells.append(f"{largest / MIB:.2f} | {getattr(devices[r, group[0]], part) / MIB:.2f}")
            if is_held:
                largest, held = max(measured[rank].host for rank in ranks), [on_hosts.get((r, s)) for s in group]
                there = sum(each.held for each in held if each is not None)
                cells.append(f"{largest / MIB:.2f} | {there / MIB:.2f}")
            table.add_row(str(r), number_ranges(group), number_ranges(ranks), *cells)
    return table
