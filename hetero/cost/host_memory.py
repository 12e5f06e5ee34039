"""Bytes of its host's memory that a rank takes for what its plan leaves there, and whether hosts have them.

Of the P parameters whose optimizer state a rank owns and keeps on its host, in bytes per parameter where training is in
bf16 or fp16:

    optimizer     12   master weight and two moments
    previews      12   the same again, where updates are previewed (:mod:`hetero.runtime.host_adamw`)
    gradients      4   as they are summed; of all that the rank holds, owned or not, where they add up there
    weights        2   on their way back, none where the device is the host's own processor; of all that the rank holds,
                       owned or not, where they live there
    checkpoint    12   the state once more, while a checkpoint is written

Of activations that are there, those of all microbatches in flight. On CUDA gradients, weights and activations are in
pinned memory, whose regions are rounded up to pages (:mod:`hetero.runtime.pinned_memory`).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.cost.cost_model import CostModel
from hetero.cost.gradient_volume import OwnedParameters, owned_parameters, parameters_held_twice
from hetero.cost.memory import memory_costs
from hetero.cost.offload.blocks import ElementBytes
from hetero.cost.stage_memory import blocks_on_host, gradients_to_host, largest_gradient, weights_to_host
from hetero.errors import PlanMemoryError
from hetero.plan.ir import Plan, Replica, StageKey
from hetero.plan.lowering import step_rows
from hetero.plan.offload import NOTHING_ON_HOST, hosts_update
from hetero.schedule.activation_residency import worst_moments
from hetero.spec.cluster import ClusterSpec
from hetero.spec.devices import DeviceType
from hetero.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of a host's memory that one rank takes for a stage."""

    optimizer: int = 0
    previews: int = 0
    gradients: int = 0
    weights: int = 0
    checkpoint: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return sum(self.named().values())

    @property
    def held(self) -> int:
        """What is there all the time."""
        return self.total - self.checkpoint - self.activations

    @property
    def pinned(self) -> int:
        """What copies to and from the device go through; the optimizer's state stays on the host."""
        return self.gradients + self.weights + self.activations

    def named(self) -> dict[str, int]:
        """Its parts by their names."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __add__(self, other: "HostMemory") -> "HostMemory":
        return HostMemory(**{name: count + getattr(other, name) for name, count in self.named().items()})


def host_memory(plan: Plan, costs: CostModel) -> Mapping[StageKey, HostMemory]:
    """What the rank that takes most of each stage takes of its host; nothing of stages that leave nothing there."""
    taken = _taken_by_ranks(plan, costs)
    return {
        (r, s): max((taken[rank][s] for rank in stage.ranks), key=lambda held: held.total)
        for r, s, stage in plan.stages()
        if stage.offload != NOTHING_ON_HOST
    }


def host_memory_of_ranks(plan: Plan, costs: CostModel) -> Mapping[int, HostMemory]:
    """By rank, what it takes of its host's memory at most, of all its stages; empty where nothing is left to hosts."""
    taken = _taken_by_ranks(plan, costs)
    return {rank: sum(taken.get(rank, {}).values(), HostMemory()) for rank in plan.ranks()} if taken else {}


def _taken_by_ranks(plan: Plan, costs: CostModel) -> Mapping[int, Mapping[int, HostMemory]]:
    """By rank and stage, of the stages that leave something to their hosts."""
    found: dict[int, dict[int, HostMemory]] = {}
    owned = owned_parameters(plan) if hosts_update(stage for _, _, stage in plan.stages()) else {}
    added = _added(plan, costs)
    for r, s, stage in plan.stages():
        if stage.offload == NOTHING_ON_HOST:
            continue
        device_type, activations = plan.device_types.of(stage.device), _activations(plan.replicas[r], s, costs)
        for rank in stage.ranks:
            owns = owned[rank][s] if owned else OwnedParameters()
            updated = of_parameters(owns.on_host, costs, device_type, speculates=stage.offload.speculate)
            more = added[r, s] - int(costs.gradient_bytes * owns.added)
            on_way = of_parameters(owns.on_host - owns.kept, costs, device_type, speculates=False).weights
            found.setdefault(rank, {})[s] = dataclasses.replace(
                updated,
                gradients=updated.gradients + more,
                weights=on_way + costs.element_bytes * sum(weights_to_host(stage, costs).values()),
                activations=activations,
            )
    return found


def _added(plan: Plan, costs: CostModel) -> Mapping[StageKey, int]:
    """Bytes of a rank of each stage for gradients that add up on its host, and of the memory in which one arrives."""
    found, twice = {}, parameters_held_twice(plan) if hosts_update(stage for _, _, stage in plan.stages()) else {}
    for r, s, stage in plan.stages():
        elements = sum(gradients_to_host(stage, costs).values())
        beside = twice[r, s].on_host if elements else 0
        arrives = largest_gradient(stage, costs) if elements else 0
        found[r, s] = costs.gradient_bytes * (elements + beside + arrives)
    return found


def _activations(replica: Replica, s: int, costs: CostModel) -> int:
    """Bytes of the most microbatches of a stage that are in flight at a time."""
    saved = sum(block.num_bytes for block in blocks_on_host(replica.stages[s], costs).values())
    if not saved:
        return 0
    row = next(row for group, row in zip(replica.device_groups, step_rows(replica), strict=True) if s in group)
    return saved * max(moment[s].in_flight for moment in worst_moments(row))


def host_memory_of_nodes(plan: Plan, cluster: ClusterSpec) -> Mapping[int, HostMemory]:
    """By node, what its ranks take of its memory; of nodes to which something is left."""
    nodes: dict[int, HostMemory] = {}
    if all(stage.offload == NOTHING_ON_HOST for _, _, stage in plan.stages()):
        return nodes
    for rank, taken in host_memory_of_ranks(plan, memory_costs(plan)).items():
        if taken.total:
            node = cluster.node_of_rank(rank)
            nodes[node] = nodes.get(node, HostMemory()) + taken
    return nodes


def check_host_memory(plan: Plan, cluster: ClusterSpec) -> None:
    """Raise unless every host of ``cluster`` has the memory for what ``plan`` leaves to it.

    Raises:
        PlanMemoryError: naming the node, the bytes and what would help; also of hosts that nobody has described.
    """
    for node, taken in host_memory_of_nodes(plan, cluster).items():
        node_type = cluster.node_type_of_node(node)
        usable = node_type.usable_host_memory_gib
        needed = f"{taken.total / GIB:.2f} GiB, a checkpoint that is written included"
        if usable is None:
            raise PlanMemoryError(
                f"node {node}: its ranks leave {needed} to the host, and the cluster file does not say what node type "
                f"{node_type.name!r} has; add the output of `hetero profile host` under host, or set host_memory_gib"
            )
        if taken.total > usable * GIB:
            raise PlanMemoryError(
                f"node {node}: its ranks leave {needed} to the host, and node type {node_type.name!r} has {usable:g} "
                "GiB; let stages keep more on their devices (a higher optimizer_from, gradients_from or "
                "weights_from, a lower activations_until), or "
                "set speculate to false, with which the state is there once"
            )


def of_parameters(numel: float, costs: CostModel, device_type: DeviceType, *, speculates: bool) -> HostMemory:
    """What a rank on such a device takes of its host, for ``numel`` parameters that it owns and leaves there."""
    element_bytes = ElementBytes.of(costs)
    state = int(element_bytes.host_state * numel)
    return HostMemory(
        optimizer=state,
        previews=state if speculates else 0,
        gradients=int(element_bytes.gradient * numel),
        weights=int(element_bytes.weight * numel) if device_type.compute_capability is not None else 0,
        checkpoint=state,
    )
