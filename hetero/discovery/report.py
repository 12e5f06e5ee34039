"""Prints what discovery found, what it assumed, and what it could not find out."""

import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hetero.discovery.described import DescribedCluster, RemarkKind
from hetero.discovery.links import gb_per_s
from hetero.report.tables.fitting_table import FittingTable
from hetero.spec.cluster import NodeType

_HEADINGS: dict[RemarkKind, str] = {
    "assumed": "Assumed, as nobody measured it",
    "unknown": "Not found out",
}


def print_found(found: DescribedCluster, console: Console, *, out: Path | None) -> None:
    """Print node types, remarks, and what to do next; ``out`` is where the file went, ``None`` for stdout."""
    console.print(_table(found))
    for node_type in found.cluster.node_types:
        console.print(Text(f"{node_type.name}: {', '.join(node_type.nodes)}"))
    for kind, heading in _HEADINGS.items():
        # What is said of several node types is said once.
        said = dict.fromkeys((remark.text, remark.todo) for remark in found.remarks if remark.kind == kind)
        if said:
            console.print(Text(f"\n{heading}", style="bold"))
        for text, todo in said:
            console.print(Text(f"- {text}"))
            if todo:
                console.print(Text(f"  -> {todo}", style="yellow"), soft_wrap=True)
    if out is not None:
        num_nodes = sum(node_type.count for node_type in found.cluster.node_types)
        counted = f"{_counted(num_nodes, 'node')}, {_counted(found.cluster.num_devices, 'device')}"
        console.print(Text(f"\n{out}: {counted}; docs/cluster.md explains every line. Next:"), soft_wrap=True)
        plan = f"hetero plan --cluster {shlex.quote(str(out))} --model MODEL.yaml --global-batch-size N"
        console.print(Text(f"  {plan}"), soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(found: DescribedCluster) -> Table:
    table = FittingTable()
    table.add_column("node type")
    for header in (
        "nodes",
        "devices",
        "GiB\neach",
        "inside\nGB/s",
        "NICs",
        "host\nGiB",
        "NUMA\nnodes",
        "GPUs per\nswitch",
    ):
        table.add_column(header, justify="right")
    for node_type in found.cluster.node_types:
        table.add_row(node_type.name, *_figures(found, node_type))
    return table


def _figures(found: DescribedCluster, node_type: NodeType) -> list[str]:
    device = found.cluster.device_types.of(node_type.device)
    memory = node_type.memory_gib or device.memory_gib
    host = node_type.host
    assert host is not None, "discovery describes it"
    return [
        str(node_type.count),
        f"{node_type.gpus_per_node} x {device.name}",
        "" if memory is None else str(memory),
        "" if node_type.inside_node is None else f"{gb_per_s(node_type.inside_node):g}",
        str(node_type.nics_per_node),
        f"{host.memory_gib:g}",
        str(host.numa_nodes),
        str(host.gpus_per_switch),
    ]
