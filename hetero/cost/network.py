"""Prices communication: the slices that cross a boundary between two stages, and collectives on gradient buckets.

What crosses a boundary are the messages of :mod:`hetero.plan.reshard`.

A device sends one message after the other, and receives likewise; both directions at once. Between nodes, devices
that share a network interface take turns on it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.plan.reshard import Transfer
from hetero.plan.sync_domains import rails_of
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.link import GroupLink, Link
from hetero.units import US_PER_S

Port = tuple[str, int, int]
"""``("out" | "in", node, interface)``: one direction of one network interface."""


RING_SHARE = 0.75
"""Of a link between nodes, what a ring of NCCL reaches of the bandwidth of single messages. Calibrated on the sums of
gradients of 15 runs of Megatron-LM on GH200, which were timed alone (docs/cost_model.md)."""


class Topology:
    """Nodes, interfaces and links of the ranks of a cluster; answers are remembered."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self._nics: list[tuple[int, int]] = []
        self._types: list[NodeType] = []
        node = 0
        for node_type in cluster.node_types:
            nics = [node_type.nic_of_device(position) for position in range(node_type.gpus_per_node)]
            for _ in range(node_type.count):
                self._nics += [(node, nic) for nic in nics]
                node += 1
            self._types += [node_type] * node_type.num_devices
        self._links: dict[tuple[str, str, bool], Link] = {}
        self._messages: dict[tuple[str, str, bool, int], tuple[float, float]] = {}

    def node(self, rank: int) -> int:
        """The node that ``rank`` sits on."""
        return self._nics[rank][0]

    def zone(self, rank: int) -> str:
        """The zone that ``rank`` sits in."""
        return self._types[rank].zone

    def nic(self, rank: int) -> tuple[int, int]:
        """The node of ``rank`` and the network interface that it uses there."""
        return self._nics[rank]

    def link(self, a: int, b: int) -> Link:
        """The link between two ranks.

        Raises:
            ConfigError: the cluster does not describe it.
        """
        key = self._types[a].name, self._types[b].name, self.node(a) == self.node(b)
        if key not in self._links:
            self._links[key] = self.cluster.link_between(a, b)
        return self._links[key]

    def message_s(self, sender: int, receiver: int, num_bytes: int) -> tuple[float, float]:
        """Seconds that a message takes of its link, and the latency that is added until it is there.

        Raises:
            ConfigError: as :meth:`link`.
        """
        nodes = self._nics[sender][0], self._nics[receiver][0]
        key = self._types[sender].name, self._types[receiver].name, nodes[0] == nodes[1], num_bytes
        known = self._messages.get(key)
        if known is None:
            link = self.link(sender, receiver)
            known = self._messages[key] = num_bytes / link.bytes_per_s(num_bytes), link.latency_us / US_PER_S
        return known

    def group_link(self, rank: int, size: int) -> GroupLink | None:
        """The measured all-reduce of ``size`` devices on the node of ``rank``, or of the next larger number."""
        groups = self._types[rank].all_reduce_inside_node
        return next((group for group in groups if group.size >= size), groups[-1] if groups else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCost:
    """One slice of a boundary in one direction.

    seconds: from its start to its last byte, alone on the wires.
    ports: how long each direction of each network interface is busy with it.
    """

    seconds: float
    ports: tuple[tuple[Port, float], ...]
    num_bytes: int

    def later(self, seconds: float) -> "TransferCost":
        """The same one with its last byte so much later, its interfaces busy no longer."""
        return TransferCost(seconds=self.seconds + seconds, ports=self.ports, num_bytes=self.num_bytes)


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """A collective on a bucket: phases that follow one another, each priced alone on the wires."""

    phases: tuple[TransferCost, ...]

    def scaled(self, share: float) -> "CollectiveCost":
        """A share of it: a reduce-scatter or an all-gather costs half of an all-reduce."""
        return CollectiveCost(tuple(_scaled(phase, share) for phase in self.phases))

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)


def transfer_cost(
    messages: Iterable[Transfer], topology: Topology, *, row_bytes: int, gathers_over: int = 0
) -> TransferCost:
    """Seconds of messages that start together.

    Each device, and each interface between nodes, takes its messages one after the other; the slowest of them ends
    the slice. The links' latency counts once: it overlaps for messages that follow one another.

    Args:
        row_bytes: of one token's activation, hidden size x bytes per element.
        gathers_over: as many neighbouring receivers, which get a part each, gather all of it among them.

    Raises:
        ConfigError: two of the ranks have no link.
    """
    gathered: defaultdict[int, int] = defaultdict(int)
    devices: defaultdict[tuple[str, int], float] = defaultdict(float)
    ports: defaultdict[Port, float] = defaultdict(float)
    latency_s = 0.0
    num_bytes = 0
    for message in messages:
        message_bytes = message.num_tokens * row_bytes
        seconds, own_latency_s = topology.message_s(message.sender, message.receiver, message_bytes)
        latency_s = max(latency_s, own_latency_s)
        num_bytes += message_bytes
        gathered[message.receiver] += message_bytes
        devices["out", message.sender] += seconds
        devices["in", message.receiver] += seconds
        if topology.node(message.sender) != topology.node(message.receiver):
            ports["out", *topology.nic(message.sender)] += seconds
            ports["in", *topology.nic(message.receiver)] += seconds
    slowest_s = max([*devices.values(), *ports.values()], default=0.0)
    gather_s = 0.0
    if gathers_over > 1:
        receivers = sorted(gathered)[:gathers_over]
        # An all-gather is the second half of an all-reduce (Thakur et al. 2005).
        whole = ring_all_reduce_cost(gathers_over * gathered[receivers[0]], receivers, topology)
        gather_s = whole.seconds / 2
    alone = TransferCost(seconds=latency_s + slowest_s, ports=tuple(sorted(ports.items())), num_bytes=num_bytes)
    return alone.later(gather_s)


def ring_all_reduce_cost(num_bytes: int, ranks: Sequence[int], topology: Topology) -> TransferCost:
    """An all-reduce of ``num_bytes`` on each of ``ranks``, as a ring (alpha-beta model, e.g. Thakur et al. 2005):

        2 (n - 1) latency + 2 (n - 1) / n x num_bytes / bandwidth

    Inside a node the bandwidth is the measured one of a group, where the cluster has it. Between nodes the ring
    crosses from node to node once per interface that the group has on each node, or, where the cluster says so, once
    (:class:`hetero.spec.cluster.Links`). Every byte passes the slowest link, at :data:`RING_SHARE` of what one message
    gets of it.

    Raises:
        ConfigError: two of the ranks have no link.
    """
    n = len(ranks)
    if n < 2 or num_bytes == 0:
        return TransferCost(seconds=0.0, ports=(), num_bytes=0)
    ring = sorted(ranks, key=lambda rank: (topology.nic(rank), rank))
    if topology.node(ring[0]) == topology.node(ring[-1]):
        return TransferCost(seconds=_inside_node_s(num_bytes, ring, topology), ports=(), num_bytes=num_bytes)
    hops = [(a, b, topology.link(a, b)) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    nics = sorted({topology.nic(rank) for rank in ring})
    if topology.cluster.links.ring_interfaces == "one":
        nics = list({node: (node, nic) for node, nic in reversed(nics)}.values())  # The first one of each node.
    crossings = min(Counter(node for node, _ in nics).values())
    between = min(link.bytes_per_s(num_bytes) for a, b, link in hops if topology.node(a) != topology.node(b))
    inside = [link.bytes_per_s(num_bytes) for a, b, link in hops if topology.node(a) == topology.node(b)]
    bandwidth = min([crossings * RING_SHARE * between, *inside])
    busy_s = 2 * (n - 1) / n * num_bytes / bandwidth
    latency_s = 2 * (n - 1) * max(link.latency_us for _, _, link in hops) / US_PER_S
    ports = tuple((port, busy_s) for nic in nics for port in (("out", *nic), ("in", *nic)))
    return TransferCost(seconds=latency_s + busy_s, ports=ports, num_bytes=num_bytes)


def all_reduce_cost(
    num_bytes: int, ranks: Sequence[int], domains: Sequence[Sequence[int]], topology: Topology
) -> CollectiveCost:
    """An all-reduce of ``num_bytes`` on each of ``ranks``: hierarchical where they lie in ``domains``, else one ring.

    Raises:
        ConfigError: two of the ranks have no link.
    """
    if domains:
        return hierarchical_all_reduce_cost(num_bytes, domains, topology)
    return CollectiveCost((ring_all_reduce_cost(num_bytes, ranks, topology),))


def hierarchical_all_reduce_cost(
    num_bytes: int, domains: Sequence[Sequence[int]], topology: Topology
) -> CollectiveCost:
    """An all-reduce of ``num_bytes`` on each rank of ``domains``: inside each, across, and back (:mod:`.sync_domains`).

    With n_d ranks in domain d, m the smallest n_d, D domains and ring(b, n) the seconds of
    :func:`ring_all_reduce_cost`:

        inside = back = max_d  ring(num_bytes, n_d) / 2 x (1 if n_d = m else n_d / (n_d - 1))
        across = all m rings(num_bytes / m, D) at once, those on one interface one after the other

    A reduce-scatter is the first half of a ring (Thakur et al. 2005); a reduce per rail, which domains with more ranks
    than rails need, sends every byte over every link instead of (n_d - 1) / n_d of them. The phases wait for one
    another on every rank, so the slowest domain counts.

    Raises:
        ConfigError: two of the ranks have no link.
    """

    def ring(num_bytes: int, ranks: Sequence[int]) -> TransferCost:
        return ring_all_reduce_cost(num_bytes, ranks, topology)

    rails = rails_of([tuple(ranks) for ranks in domains])
    halves = []
    for ranks in domains:
        n = len(ranks)
        share = 0.5 if n == len(rails) else 0.5 * n / (n - 1)
        halves.append(_scaled(ring(num_bytes, ranks), share))
    inside = _concurrent(halves)
    across = _concurrent([ring(num_bytes // len(rails), rail) for rail in rails])
    return CollectiveCost((inside, across, inside))


def _scaled(cost: TransferCost, share: float) -> TransferCost:
    ports = tuple((port, share * busy_s) for port, busy_s in cost.ports)
    return TransferCost(seconds=share * cost.seconds, ports=ports, num_bytes=cost.num_bytes)


def _concurrent(costs: Sequence[TransferCost]) -> TransferCost:
    """Costs that start together; each may have to wait for all others on its interfaces."""
    total: defaultdict[Port, float] = defaultdict(float)
    for cost in costs:
        for port, busy_s in cost.ports:
            total[port] += busy_s
    seconds = max(
        cost.seconds + max((total[port] - busy_s for port, busy_s in cost.ports), default=0) for cost in costs
    )
    return TransferCost(
        seconds=seconds, ports=tuple(sorted(total.items())), num_bytes=sum(cost.num_bytes for cost in costs)
    )


def _inside_node_s(num_bytes: int, ring: Sequence[int], topology: Topology) -> float:
    n = len(ring)
    crossing = 2 * (n - 1) / n * num_bytes
    if (group := topology.group_link(ring[0], n)) is not None:
        return group.bus.latency_us / US_PER_S + crossing / group.bus.bytes_per_s(num_bytes)
    link = topology.link(ring[0], ring[1])
    return 2 * (n - 1) * link.latency_us / US_PER_S + crossing / link.bytes_per_s(num_bytes)
