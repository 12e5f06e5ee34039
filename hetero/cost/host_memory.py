"""Bytes of its host's memory that a rank takes for what its plan leaves there, and whether hosts have them.

Of the P parameters whose optimizer state a rank owns and keeps on its host, in bytes per parameter where training is in
bf16 or fp16:

    optimizer     12   master weight and two moments
    previews      12   the same again, where updates are previewed (:mod:`hetero.runtime.host_adamw`)
    gradients      4   as they are summed
    weights        2   on their way back; none where the device is the host's own processor
    checkpoint    12   the state once more, while a checkpoint is written
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.cost.cost_model import CostModel
from hetero.cost.gradient_volume import owned_parameters
from hetero.cost.memory import memory_costs
from hetero.cost.offload.blocks import ElementBytes
from hetero.errors import PlanMemoryError
from hetero.plan.ir import Plan, StageKey
from hetero.plan.offload import offloads
from hetero.spec.cluster import ClusterSpec
from hetero.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes of a host's memory that one rank takes for a stage."""

    optimizer: int = 0
    previews: int = 0
    gradients: int = 0
    weights: int = 0
    checkpoint: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def held(self) -> int:
        """What is there all the time."""
        return self.total - self.checkpoint


def host_memory(plan: Plan, costs: CostModel) -> Mapping[StageKey, HostMemory]:
    """What the rank that takes most of each stage takes of its host; nothing of stages that leave nothing there."""
    if not offloads(stage for _, _, stage in plan.stages()):
        return {}
    owned = owned_parameters(plan)
    found = {}
    for r, s, stage in plan.stages():
        if stage.offload.optimizer_from is not None:
            most = max(owned[rank][s].on_host for rank in stage.ranks)
            found[r, s] = _of_parameters(most, plan, costs, speculates=stage.offload.speculate, device=stage.device)
    return found


def host_bytes_of_ranks(plan: Plan, costs: CostModel) -> Mapping[int, int]:
    """By rank, what it takes of its host's memory at most, of all its stages."""
    if not offloads(stage for _, _, stage in plan.stages()):
        return {}
    taken = dict.fromkeys(plan.ranks(), 0)
    owned = owned_parameters(plan)
    for _, s, stage in plan.stages():
        for rank in stage.ranks:
            taken[rank] += _of_parameters(
                owned[rank][s].on_host, plan, costs, speculates=stage.offload.speculate, device=stage.device
            ).total
    return taken


def check_host_memory(plan: Plan, cluster: ClusterSpec) -> None:
    """Raise unless every host of ``cluster`` has the memory for what ``plan`` leaves to it.

    Raises:
        PlanMemoryError: naming the node, the bytes and what would help; also of hosts that nobody has described.
    """
    on_node: dict[int, int] = {}
    of_ranks = host_bytes_of_ranks(plan, memory_costs(plan))
    for rank, taken in of_ranks.items():
        if taken:
            on_node[cluster.node_of_rank(rank)] = on_node.get(cluster.node_of_rank(rank), 0) + taken
    for rank, taken in of_ranks.items():
        node, node_type = cluster.node_of_rank(rank), cluster.node_type_of_rank(rank)
        if not taken:
            continue
        usable = node_type.usable_host_memory_gib
        needed = f"{on_node[node] / GIB:.2f} GiB, a checkpoint that is written included"
        if usable is None:
            raise PlanMemoryError(
                f"node {node}: its ranks leave {needed} to the host, and the cluster file does not say what node type "
                f"{node_type.name!r} has; add the output of `hetero profile host` under host, or set host_memory_gib"
            )
        if on_node[node] > usable * GIB:
            raise PlanMemoryError(
                f"node {node}: its ranks leave {needed} to the host, and node type {node_type.name!r} has {usable:g} "
                "GiB; let stages keep more on their devices (a higher optimizer_from), or set speculate to false, with "
                "which the state is there once"
            )


def _of_parameters(numel: float, plan: Plan, costs: CostModel, *, speculates: bool, device: str) -> HostMemory:
    element_bytes = ElementBytes.of(costs)
    state = int(element_bytes.host_state * numel)
    return HostMemory(
        optimizer=state,
        previews=state if speculates else 0,
        gradients=int(element_bytes.gradient * numel),
        weights=int(element_bytes.weight * numel) if plan.device_types.of(device).compute_capability is not None else 0,
        checkpoint=state,
    )
