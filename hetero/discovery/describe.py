"""Describes nodes as a cluster: those that are alike as one node type, links between them, and what is not known."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

from hetero.discovery.described import DescribedCluster, Remark
from hetero.discovery.facts import Node
from hetero.discovery.links import AssumedLink, Network, between_link, gb_per_s, inside_link, network_of
from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.errors import ConfigError
from hetero.spec.cluster import ClusterSpec, Links, NodePair, NodeType
from hetero.spec.devices import DeviceType, is_short_of_memory
from hetero.spec.found_device import FoundDevice
from hetero.spec.host import HostProfile
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GIB

ALIKE = 0.1
"""Heuristic: hosts of one kind differ by less in their memory, and ranks of one kind in their share of the cores."""

_NAMES_SHOWN = 8
"""Names of nodes in one remark."""

CPU = SHIPPED_DEVICES.of("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """What nodes of one type have in common, but for the memory of their hosts."""

    device: DeviceType
    num_devices: int
    memory_gib: int | None
    inside: AssumedLink | None
    network: Network
    gpus_per_switch: int
    numa_nodes: int
    processor: str | None


def describe(nodes: Sequence[Node], *, date: str, allocated: Sequence[str] = (), command: str = "") -> DescribedCluster:
    """The cluster of ``nodes``, which has their types in the order of their first nodes.

    Args:
        date: of today, as the file is to say it.
        allocated: names of all nodes of the job of Slurm; none outside of one.
        command: what describes them all.

    Raises:
        ConfigError: the devices of a node are not alike, which a cluster file cannot say, or torch does not see them.
    """
    cpu_devices = _cpu_devices(nodes)
    types: list[tuple[_Kind, list[Node]]] = []
    for node in nodes:
        kind = _kind(node, cpu_devices.get(node.name))
        for other, members in types:
            if other == kind and _are_alike(node.facts.memory_bytes, members[0].facts.memory_bytes):
                members.append(node)
                break
        else:
            types.append((kind, [node]))
    names = _type_names([kind for kind, _ in types])
    node_types = tuple(
        _node_type(name, kind, members, date=date) for name, (kind, members) in zip(names, types, strict=True)
    )
    kinds = dict(zip(names, (kind for kind, _ in types), strict=True))
    described = [kind.device for kind in kinds.values() if kind.device.name not in SHIPPED_DEVICES]
    cluster = ClusterSpec(
        devices=tuple(dict.fromkeys(described)), node_types=node_types, links=_links(node_types, kinds)
    )
    return DescribedCluster(
        cluster=cluster,
        remarks=tuple(_remarks(cluster, kinds, nodes, allocated=allocated, command=command)),
    )


def _cpu_devices(nodes: Sequence[Node]) -> dict[str, DeviceType]:
    """By name of a node without GPUs, its device: the CPU that ships, or one for each kind where CPUs differ."""
    found: dict[tuple[str | None, float], DeviceType] = {}
    shares = {node.name: (node.facts.processor, _cpu_share(node)) for node in nodes if not node.gpus}
    for processor, cores in dict.fromkeys(shares.values()):
        taken = {device.name for device in found.values()}
        name = f"cpu-{cores:g}-core{'' if cores == 1 else 's'}"
        found[processor, cores] = DeviceType(name=_unused(name, taken))
    if len(found) == 1:
        found = dict.fromkeys(found, CPU)
    return {name: found[share] for name, share in shares.items()}


def _cpu_share(node: Node) -> float:
    """Cores' time of each rank, rounded to a tenth.

    Raises:
        ConfigError: its ranks have shares that differ, or it has GPUs that torch does not see.
    """
    host = node.facts.host
    if host.driver is not None and host.environment.get("CUDA_VISIBLE_DEVICES") != "":
        seen = f"torch {host.torch.version} sees no GPU" if host.torch is not None else "no torch to ask for GPUs"
        raise ConfigError(
            f"node {node.name!r}: it has NVIDIA's driver {host.driver}, but {seen}; run `hetero doctor` there, "
            'ask for GPUs if this is a step of Slurm (srun --gpus-per-node=N), or set CUDA_VISIBLE_DEVICES="" to '
            "describe its processors"
        )
    shares = [round(each, 1) or 0.1 for each in node.cores]
    if max(shares) > min(shares) * (1 + ALIKE):
        raise ConfigError(
            f"node {node.name!r}: its ranks have {', '.join(f'{each:g}' for each in shares)} cores, so that "
            "they are different devices, and a cluster file has one device type per node; bind them alike, or let each "
            "be a node of its own by SLURMD_NODENAME in its environment"
        )
    return min(shares)


def _kind(node: Node, cpu: DeviceType | None) -> _Kind:
    device = cpu if cpu is not None else _gpu_type(node)
    num_devices = len(node.gpus) or len(node.cores)
    return _Kind(
        device=device,
        num_devices=num_devices,
        memory_gib=_lacking_memory_gib(node, device),
        inside=inside_link(node, device) if num_devices > 1 else None,
        network=network_of(node),
        gpus_per_switch=min(node.facts.gpus_per_switch, num_devices) if node.gpus else 1,
        numa_nodes=node.facts.host.numa_nodes,
        processor=node.facts.processor,
    )


def _gpu_type(node: Node) -> DeviceType:
    """The type of all GPUs of a node.

    Raises:
        ConfigError: they are of several types.
    """
    torch = node.facts.host.torch
    has_cuda = torch is not None and torch.cuda is not None
    types = [
        FoundDevice(
            cuda_name=gpu.name,
            # ROCm has numbers of its own there, which mean other things.
            compute_capability=gpu.compute_capability if has_cuda else None,
            memory_bytes=gpu.memory_bytes,
        ).type_among(SHIPPED_DEVICES)
        for gpu in node.gpus
    ]
    names = [each.name for each in types]
    if len(set(names)) > 1:
        said = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        raise ConfigError(
            f"node {node.name!r}: it has {said}, and a cluster file has one device type per node; show its ranks "
            "one of them by CUDA_VISIBLE_DEVICES"
        )
    return types[0]


def _lacking_memory_gib(node: Node, device: DeviceType) -> int | None:
    """What a device really has, if that is clearly less than its type's memory."""
    least = min((gpu.memory_bytes for gpu in node.gpus), default=None)
    if least is None or device.memory_gib is None or not is_short_of_memory(least, device.memory_gib):
        return None
    return max(1, least // GIB)


def _are_alike(a: float, b: float) -> bool:
    return max(a, b) <= min(a, b) * (1 + ALIKE)


def _type_names(kinds: Sequence[_Kind]) -> list[str]:
    """A name for each: its device, how many there are, and a number if that is not enough."""
    names: list[str] = []
    for kind in kinds:
        device = re.sub(r"[^A-Za-z0-9.]+", "-", kind.device.name).strip("-")
        names.append(_unused(f"{device}-x{kind.num_devices}" if kind.num_devices > 1 else device, names))
    return names


def _unused(name: str, taken: Sequence[str] | set[str]) -> str:
    number = 1
    while (tried := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return tried


def _node_type(name: str, kind: _Kind, members: Sequence[Node], *, date: str) -> NodeType:
    least = min(node.facts.memory_bytes for node in members)
    return NodeType(
        name=name,
        device=kind.device.name,
        gpus_per_node=kind.num_devices,
        count=len(members),
        nodes=tuple(node.name for node in members),
        # Ranks that train on processors share the host's memory.
        memory_gib=kind.memory_gib if members[0].gpus else max(1, least // kind.num_devices // GIB),
        host=HostProfile(
            source=f"hetero discover, {date}",
            memory_gib=int(10 * least / GIB) / 10,
            gpus_per_switch=kind.gpus_per_switch,
            numa_nodes=kind.numa_nodes,
            processor=kind.processor,
            device=members[0].gpus[0].name if members[0].gpus else None,
        ),
        inside_node=kind.inside.link if kind.inside is not None else None,
        nics_per_node=min(kind.num_devices, kind.network.count),
    )


def _links(node_types: Sequence[NodeType], kinds: Mapping[str, _Kind]) -> Links:
    """The slowest link between any two nodes for all, and those that are faster by themselves."""
    found = {
        (a.name, b.name): between_link([kinds[a.name].network, kinds[b.name].network])
        for a, b in combinations_with_replacement(node_types, 2)
        if a is not b or a.count > 1
    }
    if not found:
        return Links()
    slowest = min(found.values(), key=lambda link: (gb_per_s(link), -link.latency_us))
    others = tuple(NodePair(node_types=pair, link=link) for pair, link in found.items() if link != slowest)
    return Links(between_nodes=slowest, node_pairs=others)


def _remarks(
    cluster: ClusterSpec, kinds: Mapping[str, _Kind], nodes: Sequence[Node], *, allocated: Sequence[str], command: str
) -> Iterator[Remark]:
    present = {node.name for node in nodes}
    if absent := [name for name in allocated if name not in present]:
        yield Remark(
            place=(),
            kind="unknown",
            text=f"The job has {len(allocated)} nodes; no task described {_some_of(absent)}.",
            todo=command,
        )
    for device in cluster.devices:
        if device.cuda_name is not None:
            yield Remark(
                place=("devices", device.name),
                kind="unknown",
                text="No data sheet of it ships, so that only a profile prices it, or its data sheet: docs/devices.md.",
            )
    measure = _measuring(cluster)
    for node_type in cluster.node_types:
        yield from _of_type(node_type, kinds[node_type.name], measure=measure)
    if cluster.links.between_nodes is not None:
        said = "; ".join(f"{name}: {kind.network.source}" for name, kind in kinds.items())
        yield Remark(
            place=("links", "between_nodes"),
            kind="assumed",
            text=f"Nobody measured the links between nodes. {said}; the latency is a heuristic.",
            todo=measure,
        )
        yield Remark(
            place=("links",),
            kind="unknown",
            text="All nodes are taken to be in one zone; give those elsewhere a zone, and its links under zone_pairs.",
        )
    yield Remark(
        place=("node_types",),
        kind="unknown",
        text="What a node costs is not known here; add price_per_hour to plan by cost.",
    )


def _some_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} others"


def _of_type(node_type: NodeType, kind: _Kind, *, measure: str) -> Iterator[Remark]:
    place = ("node_types", node_type.name)
    if not kind.device.compute_capability and kind.device.data_sheet is None:
        yield Remark(
            place=(*place, "device"),
            kind="unknown",
            text="A node without GPUs trains on its processors, one device per rank of this launch; only a measured "
            "profile prices them (hetero plan --profile).",
        )
    if kind.inside is not None:
        yield Remark(
            place=(*place, "inside_node"),
            kind="assumed",
            text=f"Nobody measured the links inside a node. {_sentence(kind.inside.source)}; the latency is a "
            "heuristic.",
            todo=measure,
        )
    yield Remark(
        place=(*place, "host"),
        kind="unknown",
        text="How fast the host updates and copies is not measured; paste the file here in place of this.",
        todo="hetero profile host --out host.json",
    )


def _sentence(text: str) -> str:
    """With a capital, but for the names of programs."""
    return text if text.startswith("nvidia-smi") else text[0].upper() + text[1:]


def _measuring(cluster: ClusterSpec) -> str:
    """The command that measures links."""
    num_nodes = sum(node_type.count for node_type in cluster.node_types)
    has_gpus = all(cluster.device_types.of(node_type.device).cuda_name for node_type in cluster.node_types)
    ranks = "gpu" if has_gpus else max(node_type.gpus_per_node for node_type in cluster.node_types)
    where = f"--rdzv-backend {RENDEZVOUS} --rdzv-endpoint localhost:0"
    if num_nodes > 1:
        endpoint = f"--rdzv-endpoint FIRST_NODE:PORT --rdzv-conf {NODE_RANK}=NODE"
        where = f"--nnodes {num_nodes} --rdzv-backend {RENDEZVOUS} {endpoint}"
    return f"torchrun {where} --nproc-per-node {ranks} -m hetero doctor"
