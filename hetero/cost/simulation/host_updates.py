"""Says when the weights that hosts update are back on their devices, in the queues that programs have for it.

Of each lane, behind the agreement on the norm at second 0:

    copy_out   OUT_G of each bucket on the host, from the head down, as it is summed
    host       HOST_UPDATE from the embedding up, from second 0 on; or PREVIEW as gradients come, and what has not
               begun by second 0 from the embedding up
    copy_in    IN_P behind each update, in their order; of weights that live on the host no copy, or where others hold
               them as well GATHER_IN, from second 0 on

A queue does one thing after the other; times before second 0 are of the step before, whose end is like this one's.
Copies share the links of their card with those of blocks (:mod:`.copy_link`): at the end of a step they go where these
leave gaps, and at the begin of the next one it is the other way round. All ranks of a node update and copy at the same
time: its threads are shared out evenly, and so is the link of devices behind one switch (heuristic: those that have
nothing to copy leave theirs to the others in reality).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetero.cost.gradient_volume import CountedBucket, buckets_of_one_rank
from hetero.cost.network import Topology
from hetero.cost.offload.host_rates import HostRates, host_rates
from hetero.cost.simulation.copy_link import Busy, CopyLink
from hetero.cost.simulation.simulated_plan import LaneKey, SimulatedPlan
from hetero.plan.offload import (
    gradients_on_host,
    hosts_update,
    stages_of_ranks,
    updates_on_host,
    weights_on_host,
)

Arrivals = Mapping[LaneKey, Mapping[float, float]]
"""By lane and position of a bucket, when the weights that the lane's hosts update are back, or on the host if they live
there: seconds after the agreement on the norm."""


LinksOfLane = Callable[[LaneKey], tuple[CopyLink, CopyLink]]
"""The links of a lane out and in, with the copies of its blocks."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """When the weights that hosts update are back, and by lane when updates use the links out and in; seconds after the
    agreement on the norm."""

    arrivals: Arrivals
    busy: Mapping[LaneKey, tuple[Busy, Busy]]


@dataclass(frozen=True, slots=True)
class _Left:
    """A bucket that a lane leaves to its hosts, how much of it the busiest of its ranks owns, whether its gradients add
    up there, and whether its weights live there."""

    bucket: CountedBucket
    owned: float
    adds: bool = False
    keeps: bool = False

    @property
    def position(self) -> float:
        return self.bucket.position


class HostUpdates:
    """The updates that a plan leaves to hosts, lane by lane; none of most plans.

    Raises:
        ConfigError: the cluster file does not say what a host can do.
    """

    def __init__(
        self, simulated: SimulatedPlan, topology: Topology, shared: Iterable[CountedBucket], *, bucket_numel: int
    ) -> None:
        self._simulated = simulated
        self._left: dict[LaneKey, list[_Left]] = {}
        self._rates: dict[LaneKey, HostRates] = {}
        self._kept: set[tuple[LaneKey, float]] = set()
        self._back_s: dict[LaneKey, Mapping[float, float]] = {}
        plan = simulated.plan
        if not hosts_update(stage for _, _, stage in plan.stages()):
            return
        held_by = stages_of_ranks([(stage.ranks, stage) for _, _, stage in plan.stages()])
        share = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
        owned: dict[LaneKey, dict[CountedBucket, float]] = defaultdict(dict)
        for bucket in (*shared, *buckets_of_one_rank(plan, bucket_numel=bucket_numel)):
            whole = sum(share[rank] for rank in bucket.ranks)
            for rank in bucket.ranks:
                if updates_on_host(bucket.position, held_by[rank]):
                    of_lane = owned[simulated.lane_of_rank[rank]]
                    of_lane[bucket] = max(of_lane.get(bucket, 0.0), bucket.numel * share[rank] / whole)
        rank_of_lane = {lane: rank for rank, lane in simulated.lane_of_rank.items()}
        for lane, buckets in owned.items():
            # The order of the forward; those of one position in any.
            stages = held_by[rank_of_lane[lane]]
            self._left[lane] = sorted(
                (
                    _Left(
                        bucket,
                        numel,
                        adds=gradients_on_host(bucket.position, stages),
                        keeps=weights_on_host(bucket.position, stages),
                    )
                    for bucket, numel in buckets.items()
                ),
                key=lambda left: left.position,
            )
            self._rates[lane] = host_rates(topology.cluster.node_type_of_rank(rank_of_lane[lane]))
        # By lane and position, as they are asked for bucket by bucket in every round.
        self._kept = {(lane, each.position) for lane, left in self._left.items() for each in left if each.keeps}
        self._back_s = {lane: self._back_on_devices_s(lane) for lane in self._left}

    def __bool__(self) -> bool:
        return bool(self._left)

    def alone(self) -> Mapping[LaneKey, Sequence[float]]:
        """By lane, the positions of buckets on hosts that no other rank holds."""
        return {
            lane: [each.position for each in left if len(each.bucket.ranks) == 1] for lane, left in self._left.items()
        }

    def keeps(self, lane: LaneKey, position: float) -> bool:
        """Whether weights at the ``position`` of a bucket live on the hosts of a lane."""
        return (lane, position) in self._kept

    def gathered_out_s(self, lane: LaneKey, bucket: CountedBucket) -> float:
        """Seconds in which what others have updated of a gathered bucket goes to the hosts of a lane, where it is."""
        owned = next(each.owned for each in self._left[lane] if each.bucket == bucket)
        return self._rates[lane].out_s(self._simulated.costs.element_bytes * (bucket.numel - owned))

    def back_on_device_s(self, lane: LaneKey, position: float) -> float | None:
        """Seconds in which the largest bucket that ends at ``position`` and adds up on the hosts of a lane comes back,
        to be summed over ranks; ``None`` where its gradients stay on the device."""
        return self._back_s.get(lane, {}).get(position)

    def _back_on_devices_s(self, lane: LaneKey) -> Mapping[float, float]:
        """As :meth:`back_on_device_s`, by position of what adds up on the hosts of a lane, the head's first."""
        shared: dict[float, int] = {}
        for each in reversed(self._left[lane]):
            if each.adds:
                numel = each.bucket.numel if len(each.bucket.ranks) > 1 else 0
                shared[each.position] = max(shared.get(each.position, 0), numel)
        rates, gradient_bytes = self._rates[lane], self._simulated.costs.gradient_bytes
        return {position: rates.in_s(gradient_bytes * numel) if numel else 0.0 for position, numel in shared.items()}

    def on_host_s(self, summed_s: Callable[[LaneKey, CountedBucket], float]) -> float:
        """When the last sums of gradients that add up on hosts are there, without which the norm is not known."""
        return max(
            (
                summed_s(lane, each.bucket) + self._out_s(lane, each)
                for lane, left in self._left.items()
                for each in left
                if each.adds
            ),
            default=0.0,
        )

    def _out_s(self, lane: LaneKey, left: _Left) -> float:
        """Seconds of the copy of sums to the host, where they are not there already."""
        if left.adds and len(left.bucket.ranks) == 1:
            return 0.0
        return self._rates[lane].out_s(self._simulated.costs.gradient_bytes * left.owned)

    def times(
        self, summed_s: Callable[[LaneKey, CountedBucket], float] | None = None, links: LinksOfLane | None = None
    ) -> HostTimes:
        """When the weights are back.

        Args:
            summed_s: when the gradients of a bucket are summed, before 0; all long before if ``None``.
            links: with the copies of the step before; free if ``None``.
        """
        arrivals, busy = {}, {}
        for lane, left in self._left.items():
            out, into = links(lane) if links is not None else (CopyLink(), CopyLink())
            arrivals[lane] = self._arrivals(lane, left, summed_s, (out, into))
            busy[lane] = _from_0_on(out), _from_0_on(into)
        return HostTimes(arrivals, busy)

    def _arrivals(
        self,
        lane: LaneKey,
        left: Sequence[_Left],
        summed_s: Callable[[LaneKey, CountedBucket], float] | None,
        links: tuple[CopyLink, CopyLink],
    ) -> Mapping[float, float]:
        rates, costs = self._rates[lane], self._simulated.costs
        out, into = links
        copied_s, free_s = {}, float("-inf")
        for each in reversed(left):
            if summed_s is not None:
                free_s = max(free_s, summed_s(lane, each.bucket))
                free_s = out.copy(free_s, self._out_s(lane, each))
            copied_s[each.bucket] = free_s
        done: list[tuple[float, _Left]] = []
        host_s = float("-inf")
        if self._speculates(lane):
            for each in reversed(left):
                if max(host_s, copied_s[each.bucket]) >= 0.0:
                    break
                host_s = max(host_s, copied_s[each.bucket]) + rates.preview_s(each.owned)
                done.append((host_s, each))
        for each in left[: len(left) - len(done)]:
            host_s = max(0.0, host_s, copied_s[each.bucket]) + rates.update_s(each.owned)
            done.append((host_s, each))
        arrived: dict[float, float] = {}
        back_s = gather_in_s = float("-inf")
        for updated_s, each in done:
            in_s = rates.in_s(costs.element_bytes * each.owned)
            if not each.keeps:
                at_s = back_s = into.copy(max(back_s, updated_s), in_s)
            elif len(each.bucket.ranks) == 1:
                at_s = updated_s
            else:
                at_s = gather_in_s = into.copy(max(gather_in_s, updated_s, 0.0), in_s)
            arrived[each.position] = max(arrived.get(each.position, at_s), at_s)
        return arrived

    def on_links(self, lane: LaneKey, added_s: Callable[[float], float], into: CopyLink) -> Mapping[float, float]:
        """By position when gradients that add up on the hosts of a lane are on its devices to be summed over ranks, the
        head's first; where nobody else holds them, when they are added.

        Args:
            added_s: when the host has added all from a position on.
            into: the link that they come back by.
        """
        found: dict[float, float] = {}
        for position, back_s in self._back_s.get(lane, {}).items():
            at_s = added_s(position)
            found[position] = into.copy(at_s, back_s) if back_s else at_s
        return found

    def _speculates(self, lane: LaneKey) -> bool:
        group = self._simulated.group(lane)
        replica = self._simulated.plan.replicas[lane.replica]
        return any(replica.stages[s].offload.speculate for s in group.stages)


def _from_0_on(link: CopyLink) -> Busy:
    """What is taken of a link in the next step."""
    return tuple((max(0.0, start_s), end_s) for start_s, end_s in link.busy if end_s > 0.0)
