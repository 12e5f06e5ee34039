"""Says when each lane of a simulated step has its gradients whole: on its device, or added up on its hosts."""

import math
from collections.abc import Callable, Mapping
from functools import cache

from hetero.cost.simulation.activation_copies import StageCopies
from hetero.cost.simulation.gradient_ready import share_of_backward
from hetero.cost.simulation.host_updates import HostUpdates
from hetero.cost.simulation.replica_replays import ReplicaReplays
from hetero.cost.simulation.simulated_plan import LaneKey, SimulatedPlan


def gradients_ready(simulated: SimulatedPlan, replays: ReplicaReplays) -> Callable[[LaneKey, float], float]:
    """When a lane has all gradients from a position on."""

    @cache
    def ready_s(lane: LaneKey, position: float) -> float:
        point = simulated.group(lane).points.gradients_ready(position)
        start_s, end_s = replays.interval(lane, point.action)
        if point.position is None:
            return end_s
        stage = simulated.stage_of(lane, point)
        return start_s + (end_s - start_s) * share_of_backward(
            simulated.costs, stage, point.position, point.action.kind
        )

    return ready_s


def gradients_added(
    simulated: SimulatedPlan,
    replays: ReplicaReplays,
    hosts: HostUpdates,
    copies: Mapping[LaneKey, StageCopies],
) -> Callable[[LaneKey, float], float]:
    """As :func:`gradients_ready`, and of gradients that add up on the host when they are added there and, where several
    ranks share them, back on the device.

    Left out: what earlier backwards have left under way when the last one begins.
    """
    ready_s = gradients_ready(simulated, replays)

    def added_s(lane: LaneKey, position: float) -> float:
        back_s = hosts.back_on_device_s(lane, position)
        if back_s is None:
            return ready_s(lane, position)
        point = simulated.group(lane).points.gradients_ready(position)
        start_s, end_s = replays.interval(lane, point.action)
        left_s = ready_s(lane, position)
        free_s, last_position = start_s, math.inf
        for block in reversed(dict(copies[lane]).get(point.action.stage, ())):
            # Of the block that ``position`` lies in, the first one below it, all leaves together.
            if block.add_s is not None and last_position > position:
                last_position = block.position
                free_s = max(free_s, start_s + (end_s - start_s) * block.backward[1]) + block.add_s
        return max(left_s, free_s) + back_s

    return cache(added_s)
