"""Says what one rank gets of its host while all ranks of its node ask for it: copies, sums of gradients and updates.

Simulator, emulation and the choice of what goes to the host all price by it.
"""

import math
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.spec.cluster import NodeType
from hetero.spec.link import Link
from hetero.units import GB, US_PER_S

PREVIEW_FACTOR = 1.8
"""What a preview and its commit take over a direct update; measured from 1.6 to 1.8 on one host
(docs/offload.md, ``tests/bench/bench_host_adamw.py``)."""

COPIES_OF_A_SUM = 1.5
"""Bytes that a sum in the host's memory moves over those of a copy: it reads two numbers and writes one where a copy
reads one and writes one, and memory is what both wait for. A heuristic."""


@dataclass(frozen=True, slots=True)
class HostLinks:
    """What one rank gets of the links to its host while all ranks of the node copy.

    copy_out, copy_in: links that are shared with ``sharing`` - 1 others.
    added_bytes_per_s: what the host adds to a sum of gradients; as much as arrives where nobody has measured.
    """

    copy_out: Link
    copy_in: Link
    sharing: int
    added_bytes_per_s: float = math.inf

    def out_s(self, num_bytes: float) -> float:
        """Seconds of a copy to the host."""
        return _copy_s(self.copy_out, num_bytes, self.sharing)

    def in_s(self, num_bytes: float) -> float:
        """Seconds of a copy to the device."""
        return _copy_s(self.copy_in, num_bytes, self.sharing)

    def sum_s(self, num_bytes: float) -> float:
        """Seconds to add gradients, of so many bytes as they are summed, to what is in the host's memory."""
        return num_bytes / self.added_bytes_per_s

    def add_s(self, num_bytes: float, *, sum_bytes: float) -> float:
        """Seconds of a copy to the host of gradients that are then added to a sum there."""
        return self.out_s(num_bytes) + self.sum_s(sum_bytes)


def _copy_s(link: Link, num_bytes: float, sharing: int) -> float:
    return link.latency_us / US_PER_S + num_bytes * sharing / link.bytes_per_s(max(1, int(num_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates(HostLinks):
    """What one rank gets of its host while all ranks of the node ask for it.

    update: parameters per second.
    threads: of the host, for these updates.
    """

    update: float
    threads: int = 1

    def update_s(self, elements: float) -> float:
        """Seconds of a direct update."""
        return elements / self.update

    def preview_s(self, elements: float) -> float:
        """Seconds of a preview, whose commit takes none."""
        return PREVIEW_FACTOR * self.update_s(elements)


def host_links(node_type: NodeType) -> HostLinks:
    """The links of a rank of such a node.

    Where the cluster file knows no link to the host, copies stay inside the host's memory.

    Raises:
        ConfigError: the cluster file does not say how fast either is.
    """
    host = node_type.host
    if host is not None and host.to_host is not None and host.to_device is not None:
        return HostLinks(host.to_host, host.to_device, host.gpus_per_switch, _added_bytes_per_s(node_type))
    if host is None or host.memory_copy_gb_per_s is None:
        raise ConfigError(
            f"node type {node_type.name!r}: the plan leaves something to its hosts, and the cluster file has under "
            "host neither to_host and to_device nor memory_copy_gb_per_s; put the output of `hetero profile host` there"
        )
    inside = Link(bandwidth_gb_per_s=host.memory_copy_gb_per_s, latency_us=0.0)
    return HostLinks(inside, inside, node_type.gpus_per_node, _added_bytes_per_s(node_type))


def _added_bytes_per_s(node_type: NodeType) -> float:
    rate = node_type.host.memory_copy_gb_per_s if node_type.host is not None else None
    return rate * GB / COPIES_OF_A_SUM / node_type.gpus_per_node if rate is not None else math.inf


def can_update(node_type: NodeType) -> bool:
    """Whether the cluster file says all that :func:`host_rates` needs."""
    host = node_type.host
    return bool(host and host.updates and (host.to_host or host.memory_copy_gb_per_s))


def host_rates(node_type: NodeType) -> HostRates:
    """What a rank of such a node gets of its host.

    Raises:
        ConfigError: the cluster file does not say.
    """
    host, ranks = node_type.host, node_type.gpus_per_node
    if host is None or not host.updates:
        raise ConfigError(
            f"node type {node_type.name!r}: the plan lets its hosts update, and the cluster file does not say how fast "
            "they do; put the output of `hetero profile host` under its key host"
        )
    threads = max(1, max(rate.threads for rate in host.updates) // ranks)
    links = host_links(node_type)
    return HostRates(
        links.copy_out,
        links.copy_in,
        links.sharing,
        links.added_bytes_per_s,
        update=host.elements_per_s(threads=threads, ranks=ranks),
        threads=threads,
    )
