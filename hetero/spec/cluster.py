"""Describes a cluster: its devices, the nodes and zones in which they are, and the links between them.

Ranks number the devices in file order: the nodes of the first node type one after the other, then the next type's.
A person writes this as YAML:

    node_types:
      - {name: fast, device: A100-40, gpus_per_node: 8, count: 2, zone: room-1,
         inside_node: {bandwidth_gb_per_s: 200, latency_us: 10}}
      - {name: slow, device: V100-16, gpus_per_node: 4, count: 1, zone: room-2,
         inside_node: {bandwidth_gb_per_s: [[1000000, 14], [64000000, 59]], latency_us: 10}}
    links:
      between_nodes: {bandwidth_gb_per_s: 3, latency_us: 30}
      zone_pairs:
        - {zones: [room-1, room-2], link: {bandwidth_gb_per_s: 0.6, latency_us: 500}}

Figures here say what a link can do; what a layer costs on a device comes from a profile. What a host does for its
devices (:mod:`.host`) may stand under ``host`` of a node type.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.serialization import STRICT, near_match
from hetero.spec.devices import DeviceCatalogue, DeviceType, check_described_once
from hetero.spec.host import MAX_MEMORY_GIB, HostProfile
from hetero.spec.link import GroupLink, Link
from hetero.spec.shipped_devices import SHIPPED_DEVICES, shipped_and

MAX_DEVICES = 200_000
"""Limit of a cluster's size, about that of the largest ones there are; ranks are counted one by one."""

MAX_GPUS_PER_NODE = 1024
"""Limit of a node's size: what devices of one node may be is looked at one device after the other."""

MAX_NODE_TYPES = 64
"""Limit of a cluster's node types: links are looked at pair by pair."""

MAX_PRICE_PER_HOUR = 1e9
"""Of one node, in any currency; prices are counted in thousandths, and a whole cluster's has to fit 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """A number of equal nodes in one zone; the same hardware in two zones is two node types.

    device: the name of a device type that ships (:mod:`hetero.spec.shipped_devices`), or that the cluster describes.
    nodes: names of the nodes, as Slurm calls them, else their hosts, in the order of their ranks; empty if the file
        does not say which nodes they are. A launch in an allocation of Slurm assigns nodes by them.
    memory_gib: of one device, where it is not the nominal one.
    host: what its host has been measured to do for the devices; ``None`` if nobody has.
    host_memory_gib: of one node, where training is to use less than ``host`` says, or nobody has measured that;
        ``None`` for all of it.
    price_per_hour: of one node, in whatever currency the whole file uses.
    inside_node: what connects two devices of one node; may be left out where a node has one device.
    all_reduce_inside_node: measured all-reduces, by ascending size; where there are none, a ring over ``inside_node``
        is assumed (a heuristic), which is far off where devices share a bus.
    nics_per_node: network interfaces, over which the devices of a node are spread evenly, neighbours together. A link
        between nodes is what one of them can do.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    device: str
    gpus_per_node: int
    count: int = 1
    nodes: tuple[str, ...] = ()
    memory_gib: int | None = None
    host: HostProfile | None = None
    host_memory_gib: int | None = None
    zone: str = "default"
    price_per_hour: float | None = None
    inside_node: Link | None = None
    all_reduce_inside_node: tuple[GroupLink, ...] = ()
    nics_per_node: int = 1

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ConfigError(f"node type of {self.device!r}: name is {self.name!r}, give it one that can be read")
        if not self.zone.strip():
            raise ConfigError(f"node type {self.name!r}: zone is {self.zone!r}, give it a name, or leave it out")
        for field in ("gpus_per_node", "count", "memory_gib", "host_memory_gib", "nics_per_node"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"node type {self.name!r}: {field} is {value}, must be at least 1")
        for field, most in (
            ("gpus_per_node", MAX_GPUS_PER_NODE),
            ("memory_gib", MAX_MEMORY_GIB),
            ("host_memory_gib", MAX_MEMORY_GIB),
        ):
            value = getattr(self, field)
            if value is not None and value > most:
                raise ConfigError(
                    f"node type {self.name!r}: {field} is {value:,}, at most {most:,} is planned for; is it in another "
                    "unit?"
                )
        if self.nics_per_node > self.gpus_per_node:
            raise ConfigError(
                f"node type {self.name!r}: nics_per_node is {self.nics_per_node}, must be at most gpus_per_node, which "
                f"is {self.gpus_per_node}: each device uses one; describe several of one device as one of their "
                "bandwidth together"
            )
        if self.price_per_hour is not None and not 0 <= self.price_per_hour <= MAX_PRICE_PER_HOUR:
            raise ConfigError(
                f"node type {self.name!r}: price_per_hour is {self.price_per_hour:g}, must be at least 0 and at most "
                f"{MAX_PRICE_PER_HOUR:g}; state the price of one node for one hour"
            )
        self._check_host()
        self._check_nodes()
        sizes = [group.size for group in self.all_reduce_inside_node]
        if sizes != sorted(set(sizes)):
            raise ConfigError(
                f"node type {self.name!r}: all_reduce_inside_node has sizes {sizes}; list each once, ascending"
            )

    def _check_host(self) -> None:
        if self.host is None:
            return
        if self.host_memory_gib is not None and self.host_memory_gib > self.host.memory_gib:
            raise ConfigError(
                f"node type {self.name!r}: host_memory_gib is {self.host_memory_gib}, its host has memory_gib "
                f"{self.host.memory_gib:g}; lower the former, or leave it out to use all"
            )
        if self.host.gpus_per_switch > self.gpus_per_node:
            raise ConfigError(
                f"node type {self.name!r}: gpus_per_switch of its host is {self.host.gpus_per_switch}, must be at most "
                f"gpus_per_node, which is {self.gpus_per_node}"
            )

    def _check_nodes(self) -> None:
        if self.nodes and len(self.nodes) != self.count:
            raise ConfigError(
                f"node type {self.name!r}: nodes lists {len(self.nodes)} name{'s' * (len(self.nodes) != 1)}, count is "
                f"{self.count}; name every node once, or leave nodes out"
            )
        for node in self.nodes:
            if node.split() != [node]:
                raise ConfigError(
                    f"node type {self.name!r}: nodes lists {node!r}, which is no name of a node; write it without "
                    "spaces, as Slurm calls the node"
                )

    @property
    def usable_host_memory_gib(self) -> float | None:
        """Memory of one node's host that training may use, ``None`` if unknown."""
        if self.host_memory_gib is not None:
            return self.host_memory_gib
        return self.host.memory_gib if self.host is not None else None

    @property
    def num_devices(self) -> int:
        """Number of devices on all nodes of the type."""
        return self.count * self.gpus_per_node

    def nic_of_device(self, position: int) -> int:
        """The number of the interface that a node's ``position``-th device uses."""
        return position * self.nics_per_node // self.gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePair:
    """The link between any two nodes of two types in one zone, or of one type."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    node_types: tuple[str, str]
    link: Link


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePair:
    """The link between any two nodes of two zones."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    zones: tuple[str, str]
    link: Link


RingInterfaces = Literal["all", "one"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The links between nodes.

    between_nodes: any two nodes of one zone that ``node_pairs`` does not list.
    ring_interfaces: of a node with several network interfaces, those that a ring over several of its devices gets;
        ``None`` if nobody has measured it: prices are then those of ``all``, and the planner looks at ``one`` too.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    between_nodes: Link | None = None
    node_pairs: tuple[NodePair, ...] = ()
    zone_pairs: tuple[ZonePair, ...] = ()
    ring_interfaces: RingInterfaces | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """A cluster: all of its nodes and the links between them.

    devices: descriptions of device types that do not ship.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    devices: tuple[DeviceType, ...] = ()
    node_types: tuple[NodeType, ...]
    links: Links = Links()

    def __post_init__(self) -> None:
        if not self.node_types:
            raise ConfigError("cluster: node_types is empty, it must list at least one")
        if len(self.node_types) > MAX_NODE_TYPES:
            raise ConfigError(
                f"cluster: it has {len(self.node_types):,} node types, at most {MAX_NODE_TYPES} are planned for; list "
                "equal nodes of one zone as one type with their count"
            )
        names = Counter(node_type.name for node_type in self.node_types)
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"cluster: node_types lists {repeated[0]!r} more than once; give each type its own name")
        self._check_nodes_differ()
        if self.num_devices > MAX_DEVICES:
            largest = max(self.node_types, key=lambda node_type: node_type.num_devices)
            raise ConfigError(
                f"cluster: it has {self.num_devices:,} devices, at most {MAX_DEVICES:,} are planned for; node type "
                f"{largest.name!r} has count {largest.count:,} x gpus_per_node {largest.gpus_per_node}; is a number "
                "wrong?"
            )
        self._check_devices()
        self._check_node_pairs()
        self._check_zone_pairs()

    def _check_nodes_differ(self) -> None:
        type_of: dict[str, str] = {}
        for node_type in self.node_types:
            for node in node_type.nodes:
                if node in type_of:
                    where = dict.fromkeys((type_of[node], node_type.name))
                    raise ConfigError(
                        f"cluster: nodes lists {node!r} twice, in node type {' and '.join(map(repr, where))}; each "
                        "node belongs to one type: take it out of one"
                    )
                type_of[node] = node_type.name

    def _check_devices(self) -> None:
        check_described_once(self.devices)
        for device in self.devices:
            if device.name in SHIPPED_DEVICES:
                raise ConfigError(
                    f"devices: it describes {device.name!r}, which ships with figures of its own (`hetero devices`); "
                    "leave the description out, or give the device another name"
                )
        for node_type in self.node_types:
            try:
                self.device_types.of(node_type.device)
            except ConfigError as error:
                raise ConfigError(f"node type {node_type.name!r}: {error}") from None

    def _check_node_pairs(self) -> None:
        zone_of = {node_type.name: node_type.zone for node_type in self.node_types}
        for where, pair in _numbered("node_pairs", [pair.node_types for pair in self.links.node_pairs]):
            _check_known(where, pair, "node type", list(zone_of))
            zones = [zone_of[name] for name in pair]
            if zones[0] != zones[1]:
                raise ConfigError(
                    f"{where}: {pair[0]!r} is in zone {zones[0]!r}, {pair[1]!r} in zone {zones[1]!r}; "
                    "describe the link between the two zones under links.zone_pairs"
                )

    def _check_zone_pairs(self) -> None:
        zones = list(dict.fromkeys(node_type.zone for node_type in self.node_types))
        for where, pair in _numbered("zone_pairs", [pair.zones for pair in self.links.zone_pairs]):
            _check_known(where, pair, "zone", zones)
            if pair[0] == pair[1]:
                raise ConfigError(
                    f"{where}: names zone {pair[0]!r} twice; links inside a zone are links.between_nodes "
                    "and links.node_pairs"
                )

    @property
    def all_reduce_of_devices(self) -> dict[str, tuple[GroupLink, ...]]:
        """By device, the all-reduces inside one of its nodes: measured, or a ring over the links of its devices.

        Of several node types of one device the first counts.
        """
        found: dict[str, tuple[GroupLink, ...]] = {}
        for node in self.node_types:
            links = node.all_reduce_inside_node
            if not links and node.inside_node is not None and node.gpus_per_node > 1:
                links = (GroupLink(size=node.gpus_per_node, bus=node.inside_node),)
            if links:
                found.setdefault(node.device, links)
        return found

    @property
    def device_types(self) -> DeviceCatalogue:
        """The device types that ship and that the cluster describes."""
        return shipped_and(self.devices)

    def with_host_memory_gib(self, gib: int | None) -> "ClusterSpec":
        """The same with so much memory of every host for training; as it is if ``None``.

        Raises:
            ConfigError: a host that is described has less.
        """
        if gib is None:
            return self
        return dataclasses.replace(
            self, node_types=tuple(dataclasses.replace(each, host_memory_gib=gib) for each in self.node_types)
        )

    def without_node_names(self) -> "ClusterSpec":
        """Return the same cluster on nodes that are not named: what plans and predictions depend on."""
        return dataclasses.replace(
            self, node_types=tuple(dataclasses.replace(node_type, nodes=()) for node_type in self.node_types)
        )

    @property
    def leaves_rings_open(self) -> bool:
        """Whether a ring could have one interface of a node or several, and nobody has measured which."""
        return self.links.ring_interfaces is None and any(each.nics_per_node > 1 for each in self.node_types)

    def with_ring_interfaces(self, interfaces: RingInterfaces) -> "ClusterSpec":
        """The same with so many interfaces of a node for a ring."""
        return dataclasses.replace(self, links=dataclasses.replace(self.links, ring_interfaces=interfaces))

    @property
    def num_devices(self) -> int:
        """Number of devices, which is also that of ranks."""
        return sum(node_type.num_devices for node_type in self.node_types)

    def node_type_of_rank(self, rank: int) -> NodeType:
        """The type of the node that ``rank`` sits on.

        Raises:
            ConfigError: the cluster has no such rank.
        """
        return self._locate(rank)[0]

    def node_of_rank(self, rank: int) -> int:
        """The number of the node that ``rank`` sits on; all nodes are numbered from 0 in file order.

        Raises:
            ConfigError: the cluster has no such rank.
        """
        return self._locate(rank)[1]

    def node_type_of_node(self, node: int) -> NodeType:
        """The type of a node, by its number.

        Raises:
            ConfigError: the cluster has no such node.
        """
        first = 0
        for node_type in self.node_types:
            if first <= node < first + node_type.count:
                return node_type
            first += node_type.count
        raise ConfigError(f"cluster: it has {first} nodes, and none with number {node}; the first one is 0")

    def nic_of_rank(self, rank: int) -> tuple[int, int]:
        """The number of the node that ``rank`` sits on, and of the node's network interface that it uses.

        Raises:
            ConfigError: the cluster has no such rank.
        """
        node_type, node = self._locate(rank)
        first_rank = sum(t.num_devices for t in self.node_types[: self.node_types.index(node_type)])
        position = (rank - first_rank) % node_type.gpus_per_node
        return node, node_type.nic_of_device(position)

    def device_of_rank(self, rank: int) -> DeviceType:
        """The device type of ``rank``, with the memory that this cluster says it has.

        Raises:
            ConfigError: the cluster has no such rank.
        """
        node_type = self.node_type_of_rank(rank)
        device = self.device_types.of(node_type.device)
        if node_type.memory_gib is None:
            return device
        return dataclasses.replace(device, memory_gib=node_type.memory_gib)

    def link_between(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks, the same in both directions.

        Inside a node it is the node type's; inside a zone the one that ``node_pairs`` has for the two node types,
        else ``between_nodes``; across zones the one that ``zone_pairs`` has.

        Raises:
            ConfigError: the cluster has no such rank, the ranks are the same, or the file does not say.
        """
        if rank_a == rank_b:
            raise ConfigError(f"cluster: rank {rank_a} has no link to itself")
        (type_a, node_a), (type_b, node_b) = self._locate(rank_a), self._locate(rank_b)
        if node_a == node_b:
            link, key = type_a.inside_node, f"inside_node of node type {type_a.name!r}"
        elif type_a.zone == type_b.zone:
            link = self._node_pair(type_a.name, type_b.name) or self.links.between_nodes
            key = f"links.between_nodes, or [{type_a.name}, {type_b.name}] under links.node_pairs"
        else:
            link = self._zone_pair(type_a.zone, type_b.zone)
            key = f"[{type_a.zone}, {type_b.zone}] under links.zone_pairs"
        if link is None:
            raise ConfigError(
                f"cluster: no link between ranks {rank_a} (node {node_a}, {type_a.name}, zone {type_a.zone}) and "
                f"{rank_b} (node {node_b}, {type_b.name}, zone {type_b.zone}); add {key}"
            )
        return link

    def _locate(self, rank: int) -> tuple[NodeType, int]:
        """The node type of ``rank`` and the number of its node."""
        first_rank = first_node = 0
        for node_type in self.node_types:
            if first_rank <= rank < first_rank + node_type.num_devices:
                return node_type, first_node + (rank - first_rank) // node_type.gpus_per_node
            first_rank += node_type.num_devices
            first_node += node_type.count
        raise ConfigError(f"cluster: no rank {rank}, its {self.num_devices} devices are 0 to {self.num_devices - 1}")

    def _node_pair(self, a: str, b: str) -> Link | None:
        return next((pair.link for pair in self.links.node_pairs if set(pair.node_types) == {a, b}), None)

    def _zone_pair(self, a: str, b: str) -> Link | None:
        return next((pair.link for pair in self.links.zone_pairs if set(pair.zones) == {a, b}), None)


def _numbered(key: str, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Every pair, with its place in the file for messages.

    Raises:
        ConfigError: a pair is listed twice, in either order.
    """
    seen: set[frozenset[str]] = set()
    for i, pair in enumerate(pairs):
        where = f"links.{key}.{i}"
        if frozenset(pair) in seen:
            raise ConfigError(f"{where}: lists {pair[0]!r} and {pair[1]!r} a second time; keep one link for the pair")
        seen.add(frozenset(pair))
        yield where, pair


def _check_known(where: str, names: tuple[str, ...], what: str, known: list[str]) -> None:
    for name in names:
        if name not in known:
            hint = near_match(name, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{where}: unknown {what} {name!r}{hint}")
