"""Prices the boundary between two slots by representative ranks, and remembers it."""

from dataclasses import dataclass

from hetero.cost.network import transfer_cost
from hetero.plan.ir import Stage
from hetero.plan.reshard import transfers
from hetero.planner.problem import Problem
from hetero.planner.replica.stage_options import Slot


@dataclass(frozen=True, slots=True)
class BoundaryCost:
    """What one microbatch takes across a boundary.

    seconds: c_s, the slower direction of the two.
    forward_nic_s, backward_nic_s: how long the busiest NIC is taken by either direction; 0 inside a node.
    """

    seconds: float
    forward_nic_s: float
    backward_nic_s: float


@dataclass(frozen=True, slots=True)
class PlacedSlot:
    """A slot with its place: on which node of its type, and from which device of it on."""

    slot: Slot
    node: int
    offset: int


class BoundaryCosts:
    """Prices all boundaries of a problem: nodes of a type are alike, so what counts is whether two slots share a
    node."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[PlacedSlot, PlacedSlot, int], BoundaryCost] = {}

    def between(self, sender: PlacedSlot, receiver: PlacedSlot, *, samples: int) -> BoundaryCost:
        """The cost of a microbatch of ``samples`` between two placed slots of one replica.

        Raises:
            ConfigError: the cluster describes no link between them.
        """
        first = PlacedSlot(sender.slot, 0, sender.offset)
        apart = receiver.node - sender.node if sender.slot.node_type == receiver.slot.node_type else 0
        second = PlacedSlot(receiver.slot, max(0, apart), receiver.offset)
        key = first, second, samples
        if key not in self._known:
            self._known[key] = self._cost(first, second, samples)
        return self._known[key]

    def _cost(self, sender: PlacedSlot, receiver: PlacedSlot, samples: int) -> BoundaryCost:
        a, b = self._stage(sender, samples), self._stage(receiver, samples)
        row_bytes = self._problem.model.hidden_size * self._problem.costs.element_bytes
        topology, seq_length = self._problem.topology, self._problem.seq_length
        forward, backward = (
            transfer_cost(transfers(x, y, seq_length=seq_length, phase=0), topology, row_bytes=row_bytes)
            for x, y in ((a, b), (b, a))
        )
        return BoundaryCost(
            max(forward.seconds, backward.seconds),
            max((busy_s for _, busy_s in forward.ports), default=0.0),
            max((busy_s for _, busy_s in backward.ports), default=0.0),
        )

    def _stage(self, placed: PlacedSlot, samples: int) -> Stage:
        """A stage on the slot's ranks, whatever layers it has."""
        node_type = self._problem.node_types[placed.slot.node_type]
        first_rank = node_type.ranks_of_node(placed.node)[placed.offset]
        return Stage(
            first_layer=0,
            end_layer=1,
            ranks=tuple(range(first_rank, first_rank + placed.slot.gpus)),
            device=node_type.device,
            tp=placed.slot.tp,
            dp=placed.slot.dp,
            sequence_parallel=self._problem.splits_sequence(placed.slot.tp),
            micro_batch_size=samples // placed.slot.dp,
            in_flight=1,
        )
