"""Hosts of a cluster with what they do for their devices, as far as the cluster file says."""

from collections.abc import Iterable

from rich.table import Table

from hetero.report.tables.fitting_table import FittingTable
from hetero.spec.cluster import NodeType
from hetero.spec.host import HostProfile
from hetero.spec.link import Link
from hetero.units import GB, MIB

COPY_BYTES = 64 * MIB
"""Of the copies whose bandwidth is shown."""


def hosts_table(node_types: Iterable[NodeType]) -> Table | None:
    """One row per node type whose host is described; ``None`` if none is.

    A GPU's part of the updates is what it gets while all of its node update at once, the threads shared out evenly.
    """
    described = [each for each in node_types if each.usable_host_memory_gib is not None]
    if not described:
        return None
    table = FittingTable(title="Hosts, of one node; updates in 10^6 parameters per second, copies in GB/s")
    table.add_column("node type", no_wrap=True)
    for header in ("GiB", "NUMA\nnodes", "AdamW", "with\nthreads", "spread", "per\nGPU"):
        table.add_column(header, justify="right")
    for header in ("copy in\nmemory", "to a\nGPU", "from a\nGPU", "GPUs per\nswitch"):
        table.add_column(header, justify="right")
    for node_type in described:
        host = node_type.host
        figures = [""] * 9 if host is None else _figures(host, node_type.gpus_per_node)
        table.add_row(node_type.name, f"{node_type.usable_host_memory_gib:g}", *figures)
    return table


def host_source_lines(node_types: Iterable[NodeType]) -> list[str]:
    """Whose figures they are: ``host of fast: hetero profile host, 2026-11-22; AMD EPYC; torch 2.13.0``."""
    lines = []
    for node_type in node_types:
        if (host := node_type.host) is not None:
            measured_on = [each for each in (host.processor, host.device) if each]
            versions = [f"{name} {version}" for name, version in host.versions.items()]
            lines.append(f"host of {node_type.name}: {'; '.join([host.source, *measured_on, *versions, *host.notes])}")
    return lines


def _figures(host: HostProfile, gpus_per_node: int) -> list[str]:
    updates = [""] * 4
    if host.updates:
        fastest = max(host.updates, key=lambda rate: rate.elements_per_s)
        threads = max(rate.threads for rate in host.updates)
        of_one = host.elements_per_s(threads=max(1, threads // gpus_per_node), ranks=gpus_per_node)
        updates = [
            f"{fastest.elements_per_s / 1e6:.0f}",
            str(fastest.threads),
            "" if fastest.spread is None else f"{fastest.spread:z.1%}",
            f"{of_one / 1e6:.0f}",
        ]
    copy = host.memory_copy_gb_per_s
    return [
        str(host.numa_nodes),
        *updates,
        "" if copy is None else f"{copy:.1f}",
        _bandwidth(host.to_device),
        _bandwidth(host.to_host),
        str(host.gpus_per_switch),
    ]


def _bandwidth(link: Link | None) -> str:
    return "" if link is None else f"{link.bytes_per_s(COPY_BYTES) / GB:.1f}"
