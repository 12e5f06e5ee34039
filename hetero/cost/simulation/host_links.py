"""Says how long a rank's copies to its host and back take, while all ranks of its node copy."""

from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.spec.cluster import NodeType
from hetero.spec.link import Link
from hetero.units import US_PER_S


@dataclass(frozen=True, slots=True)
class HostLinks:
    """What one rank gets of the links to its host while all ranks of the node copy.

    copy_out, copy_in: links that are shared with ``sharing`` - 1 others.
    """

    copy_out: Link
    copy_in: Link
    sharing: int

    def out_s(self, num_bytes: float) -> float:
        """Seconds of a copy to the host."""
        return _copy_s(self.copy_out, num_bytes, self.sharing)

    def in_s(self, num_bytes: float) -> float:
        """Seconds of a copy to the device."""
        return _copy_s(self.copy_in, num_bytes, self.sharing)


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
        return HostLinks(host.to_host, host.to_device, host.gpus_per_switch)
    if host is None or host.memory_copy_gb_per_s is None:
        raise ConfigError(
            f"node type {node_type.name!r}: the plan leaves something to its hosts, and the cluster file has under "
            "host neither to_host and to_device nor memory_copy_gb_per_s; put the output of `hetero profile host` there"
        )
    inside = Link(bandwidth_gb_per_s=host.memory_copy_gb_per_s, latency_us=0.0)
    return HostLinks(inside, inside, node_type.gpus_per_node)
