"""Builds replica templates: pipelines over node types, of which the cluster is then covered by copies.

A template is an ordered list of blocks. A block is one node type, ``num_stages`` consecutive stages of ``gpus``
devices each, all with one tp; it covers whole nodes, or a half, a quarter ... of one node. So there are as many
templates as ways to combine node types, however many nodes of a node type there are.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.balance import BalancedPipeline, BalancedStage, balance
from hetero.planner.replica.boundary_costs import BoundaryCost, BoundaryCosts, PlacedSlot
from hetero.planner.replica.stage_options import Slot, StageOptionTable


@dataclass(frozen=True, slots=True, order=True)
class StageBlock:
    """Equal stages in a row on one node type."""

    node_type: int
    num_stages: int
    gpus: int
    tp: int

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.gpus

    @property
    def slot(self) -> Slot:
        return Slot(self.node_type, self.gpus, self.tp)


@dataclass(frozen=True, slots=True)
class NodeLayers:
    """The positions of the model that one node of a template holds; -1 is the embedding and ``num_layers`` the head.

    runs: intervals ``[first, end)`` in ascending order. More than one where a replica comes back to a node.

    inside: several devices of the node hold the same layers.
    whole: the node has no place for another replica.
    hidden_s: seconds from the last backward of its first run until the replica's: time in which its gradients are
        summed at no cost.
    """

    node_type: int
    node: int
    runs: tuple[tuple[int, int], ...]
    inside: bool
    whole: bool
    hidden_s: float

    def holds(self, position: int) -> bool:
        return any(first <= position < end for first, end in self.runs)


@dataclass(frozen=True)
class Template:
    """A replica without ranks: who holds what, and the seconds of M microbatches of ``samples`` each.

        T(M) = fill_s + (M - 1) period_s + update_s

    devices: how many of each node type it takes.
    """

    placed_slots: tuple[PlacedSlot, ...]
    stages: tuple[BalancedStage, ...]
    samples: int
    fill_s: float
    period_s: float
    update_s: float
    devices: tuple[int, ...]
    node_layers: tuple[NodeLayers, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: covers and what is known of templates are looked up by them very often."""
        return hash((self.placed_slots, self.stages, self.samples, self.node_layers))

    def seconds(self, num_microbatches: int) -> float:
        """Seconds of a step with so many microbatches, T(M)."""
        return self.fill_s + (num_microbatches - 1) * self.period_s + self.update_s

    def most_microbatches(self, seconds: float) -> int:
        """The largest M with T(M) <= ``seconds``, 0 if not even one microbatch is done by then."""
        spare = seconds - self.fill_s - self.update_s
        return int(spare / self.period_s + 1e-9) + 1 if spare >= 0 else 0

    def most_copies(self, node_types: Sequence[PlannerNodeType]) -> int:
        """How many copies all devices of ``node_types`` have room for."""
        return min(k.num_devices // n for k, n in zip(node_types, self.devices, strict=True) if n)

    @property
    def rate(self) -> float:
        """Samples per second in the steady state."""
        return self.samples / self.period_s

    @cached_property
    def cuts(self) -> tuple[tuple[int, int, int], ...]:
        """(node type, first layer, end layer) per run of stages of one node type: what other replicas' gradients
        meet."""
        runs: list[tuple[int, int, int]] = []
        layer = 0
        for placed, stage in zip(self.placed_slots, self.stages, strict=True):
            if runs and runs[-1][0] == placed.slot.node_type:
                runs[-1] = (placed.slot.node_type, runs[-1][1], layer + stage.num_layers)
            else:
                runs.append((placed.slot.node_type, layer, layer + stage.num_layers))
            layer += stage.num_layers
        return tuple(runs)


def milli_price(template: Template, problem: Problem) -> int:
    """Price per hour of the nodes, or parts of nodes, that a copy takes, in thousandths of the currency; rounded up."""
    price = sum(
        devices / node_type.gpus_per_node * (node_type.price_per_hour or 0.0)
        for devices, node_type in zip(template.devices, problem.node_types, strict=True)
    )
    return int(-(-price * 1000 // 1))


class TemplateFactory:
    """Builds the templates of one problem."""

    def __init__(self, problem: Problem, stage_options: StageOptionTable) -> None:
        self.problem = problem
        self.stage_options = stage_options
        self._boundaries = BoundaryCosts(problem)

    def build(self, blocks: Sequence[StageBlock], samples: int, *, least_rate: float = 0.0) -> Template | None:
        """Balance the pipeline of these blocks.

        Returns:
            ``None`` if it does not fit, a dp does not divide ``samples``, or it is below ``least_rate`` samples per
            second.
        """
        slots = (block.slot for block in blocks for _ in range(block.num_stages))
        return self.balanced(place_in_order(slots, self.problem.node_types), samples, least_rate=least_rate)

    def balanced(
        self, placed_slots: tuple[PlacedSlot, ...], samples: int, *, least_rate: float = 0.0
    ) -> Template | None:
        """Balance the pipeline of these slots, in any order; otherwise as :meth:`build`."""
        options = [self.stage_options.of(placed.slot, samples) for placed in placed_slots]
        if not all(options) or len(options) > self.problem.model.num_layers:
            return None
        boundary_costs = self.boundary_costs(placed_slots, samples)
        found = balance(
            options,
            boundary_costs,
            num_layers=self.problem.model.num_layers,
            nic_s=self.nic_s(placed_slots, boundary_costs),
            worth_s=samples / least_rate if least_rate else float("inf"),
        )
        return None if found is None else self.template(placed_slots, found, samples)

    def boundary_costs(self, placed_slots: Sequence[PlacedSlot], samples: int) -> list[BoundaryCost]:
        """The costs of the boundary after each slot but the last."""
        return [self._boundaries.between(a, b, samples=samples) for a, b in itertools.pairwise(placed_slots)]

    def nic_s(self, placed_slots: Sequence[PlacedSlot], boundary_costs: Sequence[BoundaryCost]) -> float:
        """Seconds per microbatch that the busiest NIC of the replica sends.

        Replicas that share a node share its NICs: if a replica takes half of a node, it counts double.
        """
        busy: dict[tuple[int, int], float] = defaultdict(float)
        for (here, after), boundary_cost in zip(itertools.pairwise(placed_slots), boundary_costs, strict=True):
            if boundary_cost.forward_nic_s or boundary_cost.backward_nic_s:
                busy[here.slot.node_type, here.node] += boundary_cost.forward_nic_s
                busy[after.slot.node_type, after.node] += boundary_cost.backward_nic_s
        if not busy:
            return 0.0
        taken: dict[tuple[int, int], int] = defaultdict(int)
        for placed in placed_slots:
            taken[placed.slot.node_type, placed.node] += placed.slot.gpus
        return max(
            seconds * max(1, self.problem.node_types[node_type].gpus_per_node // taken[node_type, node])
            for (node_type, node), seconds in busy.items()
        )

    def template(self, placed_slots: tuple[PlacedSlot, ...], balanced: BalancedPipeline, samples: int) -> Template:
        """The template of a pipeline that has been balanced."""
        boundary_costs = self.boundary_costs(placed_slots, samples)
        devices = [0] * len(self.problem.node_types)
        for placed in placed_slots:
            devices[placed.slot.node_type] += placed.slot.gpus
        return Template(
            placed_slots=placed_slots,
            stages=balanced.stages,
            samples=samples,
            fill_s=balanced.fill_s,
            period_s=balanced.period_s,
            update_s=_update_s(balanced.stages, boundary_costs),
            devices=tuple(devices),
            node_layers=tuple(_node_layers(placed_slots, balanced.stages, boundary_costs, self.problem)),
        )


def place_in_order(slots: Iterable[Slot], node_types: Sequence[PlannerNodeType]) -> tuple[PlacedSlot, ...]:
    """Place the slots in order, the nodes of each type filled one after the other."""
    taken = [0] * len(node_types)
    placed_slots = []
    for slot in slots:
        node, offset = divmod(taken[slot.node_type], node_types[slot.node_type].gpus_per_node)
        placed_slots.append(PlacedSlot(slot, node, offset))
        taken[slot.node_type] += slot.gpus
    return tuple(placed_slots)


def _update_s(stages: Sequence[BalancedStage], boundary_costs: Sequence[BoundaryCost]) -> float:
    """The longest that a stage lets the next step wait for its update."""
    waits_s, fill_s = [], 0.0
    for s, stage in enumerate(stages):
        ends = {"first": s == 0, "last": s + 1 == len(stages)}
        waits_s.append(stage.option.update_s(stage.num_layers, **ends, fill_s=fill_s))
        fill_s += stage.seconds - stage.option.backward_s(stage.num_layers, **ends)
        fill_s += boundary_costs[s].seconds if s < len(boundary_costs) else 0.0
    return max(waits_s)


def _node_layers(
    placed_slots: Sequence[PlacedSlot],
    stages: Sequence[BalancedStage],
    boundary_costs: Sequence[BoundaryCost],
    problem: Problem,
) -> Iterator[NodeLayers]:
    """What each node of a template holds."""
    num_layers = problem.model.num_layers
    nodes: dict[tuple[int, int], NodeLayers] = {}
    taken: dict[tuple[int, int], int] = defaultdict(int)
    layer, hidden_s = 0, 0.0
    for s, (placed, stage) in enumerate(zip(placed_slots, stages, strict=True)):
        end = layer + stage.num_layers
        is_first, is_last = layer == 0, end == num_layers
        run = -1 if is_first else layer, num_layers + 1 if is_last else end
        slot, node = placed.slot, (placed.slot.node_type, placed.node)
        taken[node] += slot.gpus
        if (node_layers := nodes.get(node)) is None:
            nodes[node] = NodeLayers(*node, (run,), slot.dp > 1, False, hidden_s)
        elif node_layers.runs[-1][1] == run[0]:
            runs = (*node_layers.runs[:-1], (node_layers.runs[-1][0], run[1]))
            nodes[node] = replace(node_layers, runs=runs, inside=node_layers.inside or slot.dp > 1)
        else:
            nodes[node] = replace(node_layers, runs=(*node_layers.runs, run), inside=node_layers.inside or slot.dp > 1)
        hidden_s += stage.option.backward_s(stage.num_layers, first=is_first, last=is_last)
        hidden_s += boundary_costs[s].seconds if s < len(boundary_costs) else 0.0
        layer = end
    for node, node_layers in nodes.items():
        per_node = problem.node_types[node_layers.node_type].gpus_per_node
        yield replace(node_layers, inside=node_layers.inside or taken[node] < per_node, whole=taken[node] >= per_node)
