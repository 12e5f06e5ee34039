"""Prices the copies of weights and activations between host and device, and of gradients, block by block."""

from collections.abc import Mapping

from hetero.cost.cost_model import CostModel
from hetero.cost.network import Topology
from hetero.cost.offload.host_rates import HostLinks, host_links
from hetero.cost.simulation.activation_copies import BlockCopy, StageCopies
from hetero.cost.simulation.gradient_ready import share_of_backward, share_of_forward
from hetero.cost.simulation.simulated_plan import LaneKey, SimulatedPlan
from hetero.cost.stage_memory import blocks_on_host, fetched_weights, gradients_to_host
from hetero.plan.ir import Stage
from hetero.plan.offload import block_positions
from hetero.schedule.actions import ActionKind


def block_copies(stage: Stage, costs: CostModel, links: HostLinks) -> tuple[BlockCopy, ...]:
    """Those of a plan's stage, in the order of the forward."""
    positions = block_positions(stage, num_layers=costs.model.num_layers)
    activations, gradients = blocks_on_host(stage, costs), gradients_to_host(stage, costs)
    # Weights are on the host of no block whose gradients are not.
    weights = fetched_weights(stage, costs)
    found = []
    for i, position in enumerate(positions):
        if position not in activations and position not in gradients:
            continue
        above = positions[i + 1] if i + 1 < len(positions) else None
        forward = (
            share_of_forward(costs, stage, position) if i > 0 else 0.0,
            share_of_forward(costs, stage, above) if above is not None else 1.0,
        )
        backward = (
            share_of_backward(costs, stage, above, ActionKind.B) if above is not None else 0.0,
            share_of_backward(costs, stage, position, ActionKind.B) if i > 0 else 1.0,
        )
        out_s = in_s = add_s = None
        if position in activations:
            num_bytes = activations[position].num_bytes
            out_s, in_s = links.out_s(num_bytes), links.in_s(num_bytes)
        if position in gradients:
            numel = gradients[position]
            add_s = links.add_s(costs.element_bytes * numel, sum_bytes=costs.gradient_bytes * numel)
        fetch_s = links.in_s(costs.element_bytes * weights[position]) if position in weights else None
        found.append(BlockCopy(position, forward, backward, out_s, in_s, add_s, fetch_s))
    return tuple(found)


def copies_blocks(stage: Stage) -> bool:
    """Whether there is something to price of ``stage``."""
    return stage.offload.activations_until is not None or stage.offload.gradients_from is not None


def copies_of_lanes(simulated: SimulatedPlan, topology: Topology) -> Mapping[LaneKey, StageCopies]:
    """Of the lanes that have some.

    Raises:
        ConfigError: the cluster file does not say how fast copies are.
    """
    rank_of_lane = {lane: rank for rank, lane in simulated.lane_of_rank.items()}
    found = {}
    for lane in simulated.lane_keys():
        stages = {s: simulated.plan.replicas[lane.replica].stages[s] for s in simulated.group(lane).stages}
        if any(copies_blocks(stage) for stage in stages.values()):
            links = host_links(topology.cluster.node_type_of_rank(rank_of_lane[lane]))
            found[lane] = tuple((s, block_copies(stage, simulated.costs, links)) for s, stage in stages.items())
    return found
