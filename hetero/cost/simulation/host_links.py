"""Says how long a rank's copies to its host and back take, while all ranks of its node copy."""

import math
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.spec.cluster import NodeType
from hetero.spec.link import Link
from hetero.units import GB, US_PER_S


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

    def add_s(self, num_bytes: float, *, sum_bytes: float) -> float:
        """Seconds of a copy to the host of gradients that are then added to a sum there."""
        return self.out_s(num_bytes) + sum_bytes / self.added_bytes_per_s


def _copy_s(link: Link, num_bytes: float, sharing: int) -> float:
    return link.latency_us / US_PER_S + num_bytes * sharing / link.bytes_per_s(max(1, int(num_bytes)))


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
    """Of one rank while all of its node add: a sum moves 3/2 of a copy's bytes, a heuristic as that of
    :meth:`~hetero.cost.offload.host_resources.HostResources.add_s`."""
    rate = node_type.host.memory_copy_gb_per_s if node_type.host is not None else None
    return rate * GB / 1.5 / node_type.gpus_per_node if rate is not None else math.inf
