"""Assumes what the links of a node can do, from what connects its devices and its network interfaces.

Nobody measured them: a figure here is what the hardware is made for, or a heuristic where even that is not known.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from hetero.discovery.facts import GpuTopology, Node
from hetero.discovery.nvidia_smi import num_nvlinks
from hetero.doctor.facts import InfinibandPort
from hetero.spec.devices import DeviceType
from hetero.spec.link import Link
from hetero.units import GB

NVLINK_LATENCY_US, PCIE_LATENCY_US, CPU_LATENCY_US = 10.0, 20.0, 50.0
RDMA_LATENCY_US, SOCKET_LATENCY_US = 10.0, 50.0
"""Heuristics, of a message's first byte, with what starts the transfer."""

UNKNOWN_PCIE_GB_PER_S = 15.75
"""PCIe 3.0 with 16 lanes, which a server has at least that trains: 8 GT/s in 128 of 130 bits."""

CPU_GB_PER_S = 1.0
"""Heuristic, of gloo between two processes of a host."""

UNKNOWN_NETWORK_GB_PER_S = 1.25
"""10 Gbit/s Ethernet, a heuristic where no interface says its speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssumedLink:
    """A link that nobody measured, and what it is assumed from."""

    link: Link
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The interfaces of a node over which its devices reach other nodes.

    gb_per_s: of one of them, in one direction; ``None`` where none says its speed.
    is_rdma: InfiniBand or RoCE, not sockets.
    """

    count: int
    gb_per_s: float | None
    is_rdma: bool
    source: str


def inside_link(node: Node, device: DeviceType) -> AssumedLink:
    """The link between two devices of ``node``: of unlike pairs the slowest one, as a ring over all passes there."""
    if not node.gpus:
        link = Link(bandwidth_gb_per_s=CPU_GB_PER_S, latency_us=CPU_LATENCY_US)
        return AssumedLink(link=link, source="processes of one host, by gloo: a heuristic")
    if node.facts.topology is None:
        source = "nvidia-smi did not tell what connects the GPUs, so PCIe is assumed"
        return _over_pcie(node, source=source)
    kinds = _kinds_between(node, node.facts.topology)
    if kinds is None:
        return _over_pcie(node, source="nvidia-smi lists other GPUs than CUDA, so PCIe is assumed")
    pairs = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).most_common())
    said = f"nvidia-smi has the pairs of GPUs as {pairs}"
    slowest = min(kinds, key=num_nvlinks)
    if num_nvlinks(slowest) == 0:
        return _over_pcie(node, source=said)
    bandwidth, of_what = _nvlink_gb_per_s(node.facts.topology, num_nvlinks(slowest), device)
    link = Link(bandwidth_gb_per_s=bandwidth, latency_us=NVLINK_LATENCY_US)
    return AssumedLink(link=link, source=f"{said}, {of_what}")


def _kinds_between(node: Node, topology: GpuTopology) -> list[str] | None:
    """Of all pairs of the devices that the ranks see, which may be fewer than the driver does."""
    number_of = {address: number for number, address in enumerate(topology.pci_addresses)}
    if any(gpu.pci_address not in number_of for gpu in node.gpus):
        return None
    numbers = [number_of[gpu.pci_address] for gpu in node.gpus if gpu.pci_address is not None]
    return [topology.kinds[a][b] for a, b in combinations(numbers, 2)]


def _nvlink_gb_per_s(topology: GpuTopology, num_links: int, device: DeviceType) -> tuple[float, str]:
    """What so many links carry in one direction, and what that is from."""
    rates = [rate for rate in topology.nvlink_gb_per_s if rate is not None]
    if rates:
        return _rounded(num_links * min(rates)), f"{min(rates):g} GB/s per link and direction"
    sheet = device.data_sheet
    if sheet is not None and sheet.nvlink_gb_per_s is not None:
        return sheet.nvlink_gb_per_s / 2, "with half of the data sheet's NVLink, which counts both directions"
    # NVLink 2 to 4, of V100, A100 and H100: eight pairs of 25 Gbit/s, or half as many of twice the rate.
    return num_links * 25.0, "taken for 25 GB/s per link and direction"


def _over_pcie(node: Node, *, source: str) -> AssumedLink:
    rates = [node.facts.pcie_gb_per_s.get(gpu.pci_address or "") for gpu in node.gpus]
    known = [rate for rate in rates if rate is not None]
    if len(known) == len(rates):
        bandwidth, said = _rounded(min(known)), "what their PCIe links are made for"
    else:
        bandwidth, said = UNKNOWN_PCIE_GB_PER_S, "PCIe 3.0 x16, as the kernel does not tell what theirs is"
    return AssumedLink(
        link=Link(bandwidth_gb_per_s=bandwidth, latency_us=PCIE_LATENCY_US), source=f"{source}; bandwidth: {said}"
    )


def network_of(node: Node) -> Network:
    """The interfaces that a training of ``node`` would take: those that speak RDMA, or the fastest socket."""
    return _rdma(node) or _socket(node)


def _rdma(node: Node) -> Network | None:
    """The fastest of the active ports; where the driver tells how near they are, of those beside a GPU's switch."""
    active = [port for port in node.facts.host.infiniband if "ACTIVE" in port.state and _gbit_per_s(port) is not None]
    near = [port for port in active if _is_near(port.device, node.facts.topology)]
    chosen = near or active
    if not chosen:
        return None
    fastest = max(_gbit_per_s(port) or 0 for port in chosen)
    names = dict.fromkeys(port.device for port in chosen if _gbit_per_s(port) == fastest)
    where = ", each beside a GPU" if near else ""
    return Network(
        count=len(names),
        gb_per_s=_rounded(fastest / 8),
        is_rdma=True,
        source=f"{fastest:g} Gbit/s by RDMA over {', '.join(names)}{where}",
    )


def _is_near(nic: str, topology: GpuTopology | None) -> bool:
    """Whether no host bridge lies between an interface and some GPU; storage and management sit elsewhere."""
    return topology is not None and not {"PIX", "PXB"}.isdisjoint(topology.nics.get(nic, ()))


def _gbit_per_s(port: InfinibandPort) -> float | None:
    """Of ``200 Gb/sec (4X HDR)``, as the kernel writes it."""
    found = re.match(r"([0-9.]+) Gb/sec", port.rate)
    return float(found[1]) if found and float(found[1]) > 0 else None


def _socket(node: Node) -> Network:
    """Bridges, tunnels and the ends of containers say speeds that no wire has."""
    speeds = {
        each.name: each.speed_mbit_per_s
        for each in node.facts.host.interfaces
        if each.is_physical and each.address and each.speed_mbit_per_s
    }
    if not speeds:
        return Network(count=1, gb_per_s=None, is_rdma=False, source="no interface says its speed, taken for 10 Gbit/s")
    name, speed = max(speeds.items(), key=lambda item: item[1])
    return Network(
        count=1,
        gb_per_s=_rounded(speed / 8000),
        is_rdma=False,
        source=f"{speed / 1000:g} Gbit/s over {name} by sockets",
    )


def between_link(networks: Sequence[Network]) -> Link:
    """The link between nodes with these networks: the slower side's."""
    known = [network.gb_per_s for network in networks if network.gb_per_s is not None]
    unknown = [UNKNOWN_NETWORK_GB_PER_S] if len(known) < len(networks) else []
    latency = RDMA_LATENCY_US if all(network.is_rdma for network in networks) else SOCKET_LATENCY_US
    return Link(bandwidth_gb_per_s=min(known + unknown), latency_us=latency)


def _rounded(gb_per_s: float) -> float:
    """To four digits, more than any figure here is worth."""
    return float(f"{gb_per_s:.4g}")


def gb_per_s(link: Link) -> float:
    """What large messages get, 10^9 bytes per second."""
    return link.bytes_per_s(GB) / GB
