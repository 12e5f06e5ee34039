"""Prices every message between stages and every collective on gradients by the wires that it takes, and how long.

The prices are those of :mod:`hetero.cost.network`, message by message. What the simulator adds up per slice of a
boundary is here paid by each pair of ranks on its own: a wire per direction of a boundary and rank, and the network
interfaces of their nodes.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from hetero.cost.cost_model import CostModel
from hetero.cost.network import Port, Topology, TransferCost, all_reduce_cost
from hetero.cost.offload.host_rates import HostRates, host_links, host_rates
from hetero.cost.simulation.activation_copies import BlockCopy
from hetero.cost.simulation.copied_blocks import block_copies, copies_blocks
from hetero.distributed.timing import Collective, TransferDirection
from hetero.emulation.cluster.shared_timetable import Occupation
from hetero.plan.gradient_groups import Bucket, gradient_buckets
from hetero.plan.ir import Plan, Stage
from hetero.plan.reshard import Transfer, transfers_by_phase
from hetero.schedule.actions import ActionKind, boundaries
from hetero.spec.parameters import parameters

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")

WORLD = "world"
"""Names the meeting of all ranks at the end of a step's gradients."""


@dataclass(frozen=True, slots=True)
class MessageKey:
    """Names one message of a slice between two ranks."""

    direction: TransferDirection
    sender: int
    receiver: int
    number: int


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """Names one collective on the bucket that begins with that segment."""

    operation: Collective
    ranks: tuple[int, ...]
    parameter: str
    start: int


@dataclass(frozen=True, slots=True)
class TensorParallelKey:
    """Names the wait of a stage's tensor-parallel ranks for one another before a compute."""

    ranks: tuple[int, ...]


def collective_key(operation: Collective, bucket: Bucket) -> CollectiveKey:
    """The name of that collective on ``bucket``, which no other bucket has."""
    first = bucket.segments[0]
    return CollectiveKey(operation, bucket.ranks, first.parameter.name, first.start)


class LinkModel:
    """Knows what the ranks of a plan wait for each other at, and what each of these keeps busy for how long.

    Args:
        plan: as it is described.
        small: as it is executed, of the small model.
        bucket_numel: of ``small``'s gradients.
    """

    def __init__(self, plan: Plan, small: Plan, topology: Topology, costs: CostModel, *, bucket_numel: int) -> None:
        self._topology = topology
        self._costs = costs
        # Rows of a sequence are described ones in proportion; each has the hidden size of the described model.
        self._bytes_per_row = plan.seq_length / small.seq_length * plan.model.hidden_size * costs.element_bytes
        self._described = {p.name: p.numel for p in parameters(plan.model)}
        self._buckets = gradient_buckets(small, bucket_numel=bucket_numel)
        self._host_rates: dict[str, HostRates] = {}
        self.meetings: dict[Hashable, int] = {WORLD: small.world_size}
        self.meetings |= dict.fromkeys(_messages(small), 2)
        for _, _, stage in small.stages():
            if stage.tp > 1:
                self.meetings |= {TensorParallelKey(ranks): stage.tp for ranks in stage.tp_groups}
        for bucket in self._buckets:
            if len(bucket.ranks) > 1:
                self.meetings |= {collective_key(operation, bucket): len(bucket.ranks) for operation in COLLECTIVES}

    def wires(self) -> list[Hashable]:
        """Everything that one transfer at a time uses; the same list on every rank."""
        found: dict[Hashable, None] = {}
        for key in self.meetings:
            if isinstance(key, MessageKey):
                found |= dict.fromkeys(self._wires_between(key))
        for bucket in self._buckets:
            if len(bucket.ranks) > 1:
                found |= dict.fromkeys(wire for wire, _ in self.collective("all_reduce", bucket).wires)
        return list(found)

    def message(self, key: MessageKey, message: Transfer) -> Occupation:
        """Price a message: it is there when its last byte has left and the latency has passed."""
        num_bytes = int(message.num_tokens * self._bytes_per_row)
        busy_s, latency_s = self._topology.message_s(key.sender, key.receiver, num_bytes)
        return Occupation(
            seconds=busy_s + latency_s,
            wires=tuple((wire, busy_s) for wire in self._wires_between(key)),
        )

    def collective(self, operation: Collective, bucket: Bucket) -> Occupation:
        """Price a collective: half of an all-reduce scatters the sums, the other half gathers what became of them.

        One at a time of a rank's collectives is on its wire inside the node.
        """
        half = 1.0 if operation == "all_reduce" else 0.5
        total_s = 0.0
        ports: dict[Port, float] = {}
        for phase in self._phases(operation, bucket):
            # An interface is kept from the start on until its phase has done with it.
            ports |= {port: total_s + half * busy_s for port, busy_s in phase.ports}
            total_s += half * phase.seconds
        return Occupation(
            seconds=total_s, wires=(*((("rank", rank), total_s) for rank in bucket.ranks), *ports.items())
        )

    def host_s(self, kind: ActionKind, bucket: Bucket, rank: int) -> float:
        """Seconds of what the host of ``rank`` does to the part of ``bucket`` that the rank owns; of IN_G to all, of
        GATHER_OUT to what others own."""
        node_type = self._topology.cluster.node_type_of_rank(rank)
        if node_type.name not in self._host_rates:
            self._host_rates[node_type.name] = host_rates(node_type)
        rates, shard = self._host_rates[node_type.name], bucket.shard_of(rank)
        numel: float = self._numel(bucket) * (shard.stop - shard.start) / bucket.length
        if kind == ActionKind.IN_G:
            return rates.in_s(self._numel(bucket) * self._costs.gradient_bytes)
        if kind == ActionKind.OUT_G:
            return rates.out_s(numel * self._costs.gradient_bytes)
        if kind in (ActionKind.IN_P, ActionKind.GATHER_IN):
            return rates.in_s(numel * self._costs.element_bytes)
        if kind == ActionKind.GATHER_OUT:
            return rates.out_s((self._numel(bucket) - numel) * self._costs.element_bytes)
        return rates.preview_s(numel) if kind == ActionKind.PREVIEW else rates.update_s(numel)

    def block_copies(self, stage: Stage, rank: int) -> Mapping[float, BlockCopy]:
        """By position the blocks of a stage of the described plan whose activations, gradients or weights ``rank``
        leaves to its host."""
        if not copies_blocks(stage):
            return {}
        links = host_links(self._topology.cluster.node_type_of_rank(rank))
        return {copy.position: copy for copy in block_copies(stage, self._costs, links)}

    def _numel(self, bucket: Bucket) -> float:
        """Elements of the described model's bucket."""
        return sum(
            self._described[segment.parameter.name] * segment.numel / segment.parameter.numel
            for segment in bucket.segments
        )

    def _phases(self, operation: Collective, bucket: Bucket) -> tuple[TransferCost, ...]:
        """Those of an all-reduce: one, or three where it is hierarchical."""
        element = self._costs.element_bytes if operation == "all_gather" else self._costs.gradient_bytes
        num_bytes = int(self._numel(bucket) * element)
        return all_reduce_cost(num_bytes, bucket.ranks, bucket.domains, self._topology).phases

    def _wires_between(self, key: MessageKey) -> list[Hashable]:
        own: list[Hashable] = [("out", key.direction, key.sender), ("in", key.direction, key.receiver)]
        if self._topology.node(key.sender) == self._topology.node(key.receiver):
            return own
        return [*own, ("out", *self._topology.nic(key.sender)), ("in", *self._topology.nic(key.receiver))]


def _messages(plan: Plan) -> Iterator[MessageKey]:
    for r, replica in enumerate(plan.replicas):
        edges = boundaries(replica.microbatch_counts)
        for b, (here, after) in enumerate(pairwise(replica.stages)):
            for kind, sender, receiver in ((ActionKind.SEND_F, here, after), (ActionKind.SEND_B, after, here)):
                direction = TransferDirection(r, b, kind)
                phases = transfers_by_phase(sender, receiver, seq_length=plan.seq_length)
                for number in range(edges[b].num_slices):
                    for message in phases[number % len(phases)]:
                        yield MessageKey(direction, message.sender, message.receiver, number)
