"""Prices the copies of weights and activations between host and device, and of gradients, block by block."""

import math
from collections.abc import Mapping, Sequence

from hetero.cost.cost_model import CostModel
from hetero.cost.network import Topology
from hetero.cost.offload.host_rates import HostLinks, host_links
from hetero.cost.simulation.activation_copies import BlockCopy, LaneCopies, StageCopies
from hetero.cost.simulation.copy_link import Busy, CopyLink
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
        sum_s = 0.0
        if position in activations:
            num_bytes = activations[position].num_bytes
            out_s, in_s = links.out_s(num_bytes), links.in_s(num_bytes)
        if position in gradients:
            numel = gradients[position]
            sum_s = links.sum_s(costs.gradient_bytes * numel)
            add_s = links.out_s(costs.element_bytes * numel) + sum_s
        fetch_s = links.in_s(costs.element_bytes * weights[position]) if position in weights else None
        found.append(BlockCopy(position, forward, backward, out_s, in_s, add_s, sum_s, fetch_s))
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


def behind_updates(
    copies: StageCopies, whole: Mapping[tuple[int, float], float], gathered_out: Sequence[tuple[float, float]]
) -> LaneCopies:
    """The copies of a lane, whose weights by stage and position are on the host at these times; what is gathered goes
    there at others."""

    def whole_s(s: int, blocks: Sequence[BlockCopy], i: int) -> float:
        end = blocks[i + 1].position if i + 1 < len(blocks) else math.inf
        inside = [at_s for (stage, here), at_s in whole.items() if stage == s and blocks[i].position <= here < end]
        return max(inside, default=0.0)

    if whole:
        copies = tuple(
            (s, tuple(block._replace(whole_s=whole_s(s, blocks, i)) for i, block in enumerate(blocks)))
            for s, blocks in copies
        )
    return LaneCopies(copies, out_busy=tuple(gathered_out) if copies else ())


def beside_updates(copies: LaneCopies, busy: tuple[Busy, Busy] | None, agreed_s: float) -> LaneCopies:
    """The same where updates use the links out and in at these times after the agreement on the norm."""
    if not copies.stages or busy is None:
        return copies
    out, into = (CopyLink(each).moved(agreed_s).busy for each in busy)
    return copies._replace(out_busy=(*out, *copies.out_busy), in_busy=into)
