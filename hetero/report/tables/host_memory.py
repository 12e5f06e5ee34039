"""What a plan leaves to the memory of its hosts, as a table: one row per sort of node."""

from collections import defaultdict
from collections.abc import Iterator

from rich.table import Table

from hetero.cost.host_memory import HostMemory, host_memory_of_nodes
from hetero.plan.ir import Plan
from hetero.report.tables.fitting_table import FittingTable
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB

PARTS = tuple(HostMemory().named())
"""What a host's memory is for."""


def host_memory_rows(plan: Plan, cluster: ClusterSpec) -> Iterator[tuple[str, ...]]:
    """Node type, nodes, GiB of every part, and all of it against what the host has; of nodes that are alike once."""
    alike: dict[tuple[str, HostMemory], list[int]] = defaultdict(list)
    for node, memory in host_memory_of_nodes(plan, cluster).items():
        alike[cluster.node_type_of_node(node).name, memory].append(node)
    for (name, memory), members in alike.items():
        usable = cluster.node_type_of_node(members[0]).usable_host_memory_gib
        parts = (f"{count / GIB:.2f}" for count in memory.named().values())
        in_all = f"{memory.total / GIB:.1f} of {'?' if usable is None else f'{usable:g}'}"
        yield name, number_ranges(members), *parts, in_all


def host_memory_table(plan: Plan, cluster: ClusterSpec) -> Table | None:
    """GiB of each node's host by what they are for, against what the host has; ``None`` if nothing is left to hosts."""
    rows = list(host_memory_rows(plan, cluster))
    if not rows:
        return None
    table = FittingTable(title="GiB of hosts, a checkpoint that is written included", keys=2)
    for header in ("node type", "nodes"):
        table.add_column(header)
    for header in (*PARTS, "in all"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
