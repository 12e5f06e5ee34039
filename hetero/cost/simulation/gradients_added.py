"""Says when each lane of a simulated step has its gradients whole: on its device, or added up on its hosts."""

from collections.abc import Callable, Mapping
from functools import cache, partial

from hetero.cost.simulation.copy_link import CopyLink
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
) -> Callable[[LaneKey, float], float]:
    """As :func:`gradients_ready`, and of gradients that add up on the host when they are added there and, where several
    ranks share them, back on the device.

    Buckets come back one after the other, by the link that all copies share.
    """
    ready_s = gradients_ready(simulated, replays)

    def added_s(lane: LaneKey, position: float) -> float:
        point = simulated.group(lane).points.gradients_ready(position)
        _, replayed = replays.lane(lane)
        assert replayed.copies is not None, "gradients leave for the host"
        added = {here: at_s for (s, here), at_s in replayed.copies.added_s.items() if s == point.action.stage}
        # Of the block that ``position`` lies in, the first one below it, all leaves together. The other copy of a tied
        # embedding lies below all; its sum waits for the first stage's in any case.
        block = max((here for here in added if here <= position), default=min(added))
        return max(ready_s(lane, position), added[block])

    @cache
    def on_links(lane: LaneKey) -> Mapping[float, float]:
        _, replayed = replays.lane(lane)
        into = CopyLink(replayed.copies.into.busy if replayed.copies is not None else ())
        return hosts.on_links(lane, partial(added_s, lane), into)

    def there_s(lane: LaneKey, position: float) -> float:
        if hosts.back_on_device_s(lane, position) is None:
            return ready_s(lane, position)
        return on_links(lane)[position]

    return there_s
