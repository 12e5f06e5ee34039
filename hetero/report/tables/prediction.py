"""What a plan is predicted to take: seconds of a step and memory of its devices, as a table."""

from rich.table import Table

from hetero.cost.capacity import capacity_bytes
from hetero.cost.memory import PlanMemory, device_memory
from hetero.cost.prediction_range import StepRange
from hetero.cost.simulation.simulator import Simulation
from hetero.plan.ir import Plan
from hetero.report.plan_wording import (
    caption_of,
    depth_of,
    depth_title,
    device_of,
    held_by,
    in_turns,
    range_of,
    recompute_of,
    title_of,
)
from hetero.report.tables.fitting_table import FittingTable
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB

UNKNOWN = "?"


def prediction_table(simulation: Simulation, memory: PlanMemory, cluster: ClusterSpec, step: StepRange) -> Table:
    """One row per device group of every sort of replica: where its step goes, and what its devices hold at the peak."""
    plan = simulation.plan
    table = FittingTable(
        title=(
            f"{title_of(plan)}: {simulation.step_s:.4g} s per step ({range_of(step)}), "
            f"{simulation.samples_per_s:.4g} samples/s"
        ),
        caption=caption_of(plan),
        keys=3,
    )
    for header in ("rep-\nlicas", "sam-\nples\neach", "stage"):
        table.add_column(header, justify="right")
    for header in ("layers", "device"):
        table.add_column(header)
    for header in ("tp", "dp", "micro-\nbatch", depth_title(plan)):
        table.add_column(header, justify="right")
    table.add_column("recom-\npute")
    for header in ("busy", "bub-\nble", "sync", "memory GiB"):
        table.add_column(header, justify="right")
    devices = device_memory(plan, memory)
    for members in plan.alike():
        first = members[0]
        replica = plan.replicas[first]
        for group in replica.device_groups:
            s, stages = group[0], [replica.stages[each] for each in group]
            stage, times = stages[0], simulation.stages[first, s]
            capacity = capacity_bytes(stage, cluster)
            used_gib = max(devices[r, s].total for r in members) / GIB
            table.add_row(
                *((str(len(members)), str(replica.num_samples)) if s == 0 else ("", "")),
                number_ranges(group),
                in_turns(held_by(plan, each) for each in stages),
                device_of(stage),
                str(stage.tp),
                str(stage.dp),
                str(stage.micro_batch_size),
                " | ".join(map(depth_of, stages)),
                in_turns(map(recompute_of, stages)),
                f"{times.busy_s / simulation.step_s:z.0%}",
                f"{times.bubble_s / simulation.step_s:z.0%}",
                f"{times.sync_s / simulation.step_s:z.0%}",
                f"{used_gib:.1f} of {UNKNOWN if capacity is None else f'{capacity / GIB:g}'}",
                end_section=group == replica.device_groups[-1],
            )
    return table


def fullest(memory: PlanMemory, plan: Plan, cluster: ClusterSpec) -> str:
    """The largest share of any device's memory that its stages take, as ``92%``; ``?`` where none is known."""
    shares = []
    for (r, s), parts in device_memory(plan, memory).items():
        if (capacity := capacity_bytes(plan.replicas[r].stages[s], cluster)) is not None:
            shares.append(parts.total / capacity)
    return f"{max(shares):z.0%}" if shares else UNKNOWN
