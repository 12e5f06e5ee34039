"""What a plan leaves to the memory of its hosts, as a table: one row per sort of node."""

from collections import defaultdict

from rich import box
from rich.table import Table

from hetero.cost.host_memory import HostMemory, host_memory_of_nodes
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB


def host_memory_table(plan: Plan, cluster: ClusterSpec) -> Table | None:
    """GiB of each node's host by what they are for, against what the host has; ``None`` if nothing is left to hosts."""
    alike: dict[tuple[str, HostMemory], list[int]] = defaultdict(list)
    for node, memory in host_memory_of_nodes(plan, cluster).items():
        alike[cluster.node_type_of_node(node).name, memory].append(node)
    if not alike:
        return None
    table = Table(title="GiB of hosts, a checkpoint that is written included", title_justify="left", box=box.SQUARE)
    table.add_column("node type")
    table.add_column("nodes")
    for name in HostMemory().named():
        table.add_column(name, justify="right")
    table.add_column("in all", justify="right")
    for (name, memory), members in alike.items():
        usable = cluster.node_type_of_node(members[0]).usable_host_memory_gib
        table.add_row(
            name,
            number_ranges(members),
            *(f"{count / GIB:.2f}" for count in memory.named().values()),
            f"{memory.total / GIB:.1f} of {'?' if usable is None else f'{usable:g}'}",
        )
    return table
