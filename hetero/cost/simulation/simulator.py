"""Simulates one step of a plan: the action lists that the runtime runs, with predicted durations, on shared wires.

A step of steady training lasts from the moment at which all ranks have agreed on the gradients' norm to the next such
moment:

    update, gathers of the updated weights, forwards and backwards, sums of gradients

Second 0 is the end of the first update. Each device group starts when it has its own, and with a distributed optimizer
its first forwards wait for the weights that are gathered; the pipeline starts empty and ends empty. Where a runtime
does not wait for all before the update, every replica starts at 0 and the step ends with the last update. Reading data,
evaluation and checkpoints are not in it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from hetero.cost.cost_model import CostModel, StageCost
from hetero.cost.gradient_volume import CountedBucket, sync_buckets
from hetero.cost.layers.confidence import Confidence
from hetero.cost.network import CollectiveCost, Port, Topology, all_reduce_cost
from hetero.cost.simulation.activation_copies import StageCopies
from hetero.cost.simulation.collectives import CollectiveRun, CollectiveSpan, lanes_of_buckets, run_collectives
from hetero.cost.simulation.copied_blocks import behind_updates, beside_updates, copies_of_lanes
from hetero.cost.simulation.copy_link import CopyLink
from hetero.cost.simulation.engine import NO_CAUSE, LaneStart, Span, WeightWait
from hetero.cost.simulation.exposed_communication import TimeInterval
from hetero.cost.simulation.gradient_ready import share_of_forward
from hetero.cost.simulation.gradients_added import gradients_added, gradients_ready
from hetero.cost.simulation.host_updates import Arrivals, HostTimes, HostUpdates, LinksOfLane
from hetero.cost.simulation.replica_replays import ReplicaReplays, Spans
from hetero.cost.simulation.simulated_plan import KnownParts, LaneKey, SimulatedPlan
from hetero.cost.simulation.stage_times import LazyStageTimes, RankTimes, StageTimes, mean_times
from hetero.plan.ir import GradientSyncPlan, Plan, StageKey
from hetero.plan.lowering import launch_order
from hetero.plan.offload import hosts_update
from hetero.schedule.actions import SEND, Action, ActionKind
from hetero.spec.cluster import ClusterSpec

HOST_ROUNDS = 4
"""When gradients come to the hosts depends on when these had brought weights back, and the other way round: a step is
looked at so often at most. Heuristic: after two rounds the times mostly stay."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The predicted course of one step of a plan: its seconds, and what ran when.

    step_s: seconds of one step on the global batch.
    compute_end_s: when the last backward of all stages ends.
    confidence: the worst of the times it rests on.
    spans: computes and transfers of all lanes of the replicas that were replayed.
    alike: for each replica, the one whose spans it shares: replicas in equal circumstances are replayed once.
    syncs: the sums of gradients, in the order in which they were ready.
    transfers: when the pipeline uses each direction of each interface, once a first stage is in its last backward.
    gathers: of updated weights, in the order in which they were ready.
    simulated_plan, replays: what it was read from, for the same pipeline with other sums; ``None`` of a step that was
        executed.
    """

    plan: Plan
    step_s: float
    compute_end_s: float
    confidence: Confidence
    stages: Mapping[StageKey, StageTimes]
    costs: Mapping[StageKey, StageCost]
    spans: Sequence[Span]
    alike: tuple[int, ...]
    syncs: tuple[CollectiveSpan, ...]
    transfers: Mapping[Port, tuple[TimeInterval, ...]]
    gathers: tuple[CollectiveSpan, ...] = ()
    simulated_plan: SimulatedPlan | None = field(default=None, compare=False, repr=False)
    replays: ReplicaReplays | None = field(default=None, compare=False, repr=False)

    @property
    def samples_per_s(self) -> float:
        return self.plan.global_batch_size / self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_s * self.plan.seq_length

    @property
    def bubble_share(self) -> float:
        """Share of the device seconds of working ranks in which nothing is computed, updates included."""
        idle = working = 0.0
        for r, replica in enumerate(self.plan.replicas):
            for s, *_ in replica.device_groups:
                times, count = self.stages[r, s], len(replica.stages[s].ranks)
                working += count * self.step_s
                idle += count * (self.step_s - times.busy_s - times.update_s)
        return max(0.0, idle / working)  # Rounding may leave a little less than nothing.

    @cached_property
    def _spans_of_replica(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        slices: dict[tuple[int, int, ActionKind, int], int] = {}
        for span in self.spans:
            own = found[span.replica]
            if span.kind not in SEND:
                if span.lane == 0:
                    own.append(span)
                continue
            place = slices.setdefault((span.replica, span.stage, span.kind, span.number), len(own))
            if place == len(own):
                own.append(span)
            else:
                first_s, last_s = min(own[place].start_s, span.start_s), max(own[place].end_s, span.end_s)
                own[place] = replace(own[place], start_s=first_s, end_s=last_s)
        return found

    def spans_of(self, replica: int) -> list[Span]:
        """The computes and transfers of a replica; their ``replica`` is the one whose spans it shares.

        Of each stage the computes of its first rank, and of each slice the time from its first message to its last.
        """
        return self._spans_of_replica[self.alike[replica]]

    def update_of(self, replica: int, stage: int) -> TimeInterval:
        """When the ranks of a stage update their weights for the step that follows."""
        times = self.stages[replica, stage]
        begin_s = self.begin_s(replica, stage) + times.busy_s + times.bubble_s + times.sync_s
        return begin_s, begin_s + times.update_s

    def begin_s(self, replica: int, stage: int) -> float:
        """When the ranks of a stage had finished the update before; at 0 the first ones."""
        if self.simulated_plan is not None and not self.simulated_plan.costs.runtime.waits_for_all_before_update:
            return 0.0
        return self.stages[replica, stage].update_s - min(times.update_s for times in self.stages.values())

    def critical_path(self) -> list[Span]:
        """The chain of computes and transfers without slack that ends with the last compute, first to last."""
        last = max(range(len(self.spans)), key=lambda i: self.spans[i].end_s)
        path = []
        while last != NO_CAUSE:
            path.append(self.spans[last])
            last = self.spans[last].cause
        return path[::-1]


def simulate(
    plan: Plan,
    cluster: ClusterSpec | Topology,
    costs: CostModel,
    known: KnownParts | None = None,
    *,
    within_s: float = math.inf,
) -> Simulation:
    """Replay one step of ``plan``, which has passed the validator, on ``cluster`` under ``costs.runtime``.

    known: parts of the steps of other plans on this cluster under these costs; parts of this one are added.
    within_s: a longer step is of no interest, and may be left before its end.

    Raises:
        StepTooLong: the step takes longer than ``within_s``. One that does may be returned, too.
        ConfigError: a device has no profile, or two ranks that talk to one another no link.
        PlanError: stages count different microbatches, split their backward or share their ranks, and the runtime of
            ``costs.runtime`` cannot do that.
        ScheduleError: the depths deadlock.
    """
    topology = cluster if isinstance(cluster, Topology) else Topology(cluster)
    simulated = SimulatedPlan(plan, costs, KnownParts() if known is None else known)
    buckets = _buckets(plan, costs, simulated.known)
    hosts = HostUpdates(simulated, topology, buckets, bucket_numel=_bucket_numel(plan, costs))
    copies = copies_of_lanes(simulated, topology)
    computed_s = within_s - min(simulated.group(lane).update_s for lane in simulated.lane_keys())
    times = hosts.times()
    for _ in range(HOST_ROUNDS):
        found = _with_host_times(simulated, topology, buckets, hosts, times, copies, math.inf if hosts else computed_s)
        before, times = times, hosts.times(found.summed_s, found.links) if hosts else times
        if times == before:
            break
    return found.simulation


@dataclass(frozen=True, slots=True)
class _Round:
    """A step whose hosts bring weights back at given times; when its gradients are summed for them, and how its blocks
    use the links to the hosts, seconds after its end."""

    simulation: Simulation
    summed_s: Callable[[LaneKey, CountedBucket], float]
    links: LinksOfLane


def _with_host_times(
    simulated: SimulatedPlan,
    topology: Topology,
    buckets: Sequence[CountedBucket],
    hosts: HostUpdates,
    times: HostTimes,
    copies: Mapping[LaneKey, StageCopies],
    computed_s: float,
) -> _Round:
    begin_s = _begins(simulated)
    # The agreement was so long before second 0, at which the first device has updated.
    agreed_s = -min((simulated.group(lane).update_s for lane in begin_s), default=0.0)
    own_s = _own_weights(begin_s, times.arrivals, agreed_s)
    gathers = _gather_weights(simulated, topology, buckets, own_s)
    alone = {lane: [(p, own_s(lane, p)) for p in positions] for lane, positions in hosts.alone().items()}
    starts = _lane_starts(simulated, begin_s, gathers.spans, alone, copies, hosts)
    starts = {
        lane: replace(start, copies=beside_updates(start.copies, times.busy.get(lane), agreed_s))
        for lane, start in starts.items()
    }
    replays = ReplicaReplays(
        simulated.pipelines(topology, starts),
        runtime=simulated.costs.runtime,
        free_s=gathers.free_s,
        known=simulated.known,
        within_s=computed_s,
    )
    transfers, ready_s = replays.late_transfers(), gradients_added(simulated, replays, hosts)
    syncs = _sum_gradients(simulated, topology, buckets, transfers, ready_s, replays)
    sums = {span.bucket: span.end_s for span in syncs}

    def summed_s(lane: LaneKey, bucket: CountedBucket) -> float:
        return sums[bucket] if bucket in sums else ready_s(lane, bucket.position)

    on_host_s = hosts.on_host_s(summed_s)
    simulation = _result(simulated.plan, simulated, replays, syncs, gathers.spans, transfers, on_host_s=on_host_s)
    end_s = simulation.step_s + agreed_s

    def links(lane: LaneKey) -> tuple[CopyLink, CopyLink]:
        _, replayed = replays.lane(lane)
        if replayed.copies is None:
            return CopyLink(), CopyLink()
        return replayed.copies.out.moved(-end_s), replayed.copies.into.moved(-end_s)

    return _Round(simulation, lambda lane, bucket: summed_s(lane, bucket) - end_s, links)


def _own_weights(
    begin_s: Mapping[LaneKey, float], arrivals: Arrivals, agreed_s: float
) -> Callable[[LaneKey, float], float]:
    """When a lane has what it updates itself of a position: on its devices, or back from its hosts."""

    def own_s(lane: LaneKey, position: float) -> float:
        arrived_s = arrivals.get(lane, {}).get(position)
        return begin_s[lane] if arrived_s is None else max(begin_s[lane], agreed_s + arrived_s)

    return own_s


def with_gradient_sync(
    simulation: Simulation, gradient_sync: GradientSyncPlan, topology: Topology, costs: CostModel
) -> Simulation:
    """The prediction for the plan of ``simulation`` with another gradient sync, without a new replay where possible.

    What comes before the sums stays what it is, unless a distributed optimizer gathers the same buckets or hosts update
    them: then the step is replayed.

    Raises:
        ConfigError: two ranks that sum gradients have no link.
    """
    plan = replace(simulation.plan, gradient_sync=gradient_sync)
    simulated, replays = simulation.simulated_plan, simulation.replays
    updates_on_hosts = hosts_update(stage for _, _, stage in plan.stages())
    if simulation.gathers or updates_on_hosts or simulated is None or replays is None:
        return simulate(plan, topology, costs, None if simulated is None else simulated.known)
    transfers, ready_s = simulation.transfers, gradients_ready(simulated, replays)
    syncs = _sum_gradients(simulated, topology, _buckets(plan, costs, simulated.known), transfers, ready_s, replays)
    return _result(plan, simulated, replays, syncs, (), transfers)


def _buckets(plan: Plan, costs: CostModel, known: KnownParts) -> tuple[CountedBucket, ...]:
    bucket_numel = _bucket_numel(plan, costs)
    held = tuple(
        (r, stage.ranks, stage.start, stage.end, stage.tp, stage.splits_sequence, stage.offload)
        for r, _, stage in plan.stages()
    )
    return known.buckets.of(
        (held, plan.gradient_sync.domains, bucket_numel), lambda: sync_buckets(plan, bucket_numel=bucket_numel)
    )


def _bucket_numel(plan: Plan, costs: CostModel) -> int:
    return plan.gradient_sync.bucket_numel or costs.runtime.bucket_numel


def _begins(simulated: SimulatedPlan) -> dict[LaneKey, float]:
    """When each lane has updated its weights. Second 0 is when the first one has."""
    if not simulated.costs.runtime.waits_for_all_before_update:
        return dict.fromkeys(simulated.lane_keys(), 0.0)
    updates = {lane: simulated.group(lane).update_s for lane in simulated.lane_keys()}
    first_s = min(updates.values())
    return {lane: update_s - first_s for lane, update_s in updates.items()}


def _gathered(simulated: SimulatedPlan, buckets: Sequence[CountedBucket]) -> Sequence[CountedBucket]:
    """The buckets to gather behind the update, where all update at once."""
    return launch_order(simulated.plan, buckets)[1] if simulated.costs.runtime.waits_for_all_before_update else ()


def _gather_weights(
    simulated: SimulatedPlan,
    topology: Topology,
    buckets: Sequence[CountedBucket],
    own_s: Callable[[LaneKey, float], float],
) -> CollectiveRun:
    """Run the gathers of updated weights. All are launched behind the update, before anything of the pipeline, or each
    when its own part is back from the host."""
    return run_collectives(
        _gathered(simulated, buckets),
        cost_of=_prices(simulated, topology, bytes_per_element=simulated.costs.element_bytes, share=0.5),
        ready_s=own_s,
        lane_of_rank=simulated.lane_of_rank,
    )


def _lane_starts(
    simulated: SimulatedPlan,
    begin_s: Mapping[LaneKey, float],
    gathers: Sequence[CollectiveSpan],
    alone: Mapping[LaneKey, Sequence[tuple[float, float]]],
    copies: Mapping[LaneKey, StageCopies],
    hosts: HostUpdates,
) -> dict[LaneKey, LaneStart]:
    """When each lane starts its first compute at the earliest, and which forwards wait for their weights.

    Args:
        alone: by lane, positions of weights that are not gathered, and when they are there.
        copies: of weights, activations and gradients, of the lanes that have some.
    """
    waits: dict[LaneKey, dict[Action, WeightWait]] = defaultdict(dict)
    whole: dict[LaneKey, dict[tuple[int, float], float]] = defaultdict(dict)
    gathered_s: dict[LaneKey, float] = {}
    gathered_out: dict[LaneKey, list[tuple[float, float]]] = defaultdict(list)

    def wait_for(lane: LaneKey, position: float, there_s: float) -> None:
        point = simulated.group(lane).points.weights_needed(position)
        if hosts.keeps(lane, position) and point.position is not None:
            # The block that they are in is fetched when they are there.
            place = point.action.stage, point.position
            whole[lane][place] = max(whole[lane].get(place, there_s), there_s)
            return
        wait = waits[lane].get(point.action, WeightWait(0.0, 0.0))
        stage = simulated.stage_of(lane, point)
        share = share_of_forward(simulated.costs, stage, point.position) if point.position is not None else 0.0
        if share == 0.0:
            wait = wait._replace(start_s=max(wait.start_s, there_s))
        else:
            left_s = (1.0 - share) * simulated.costs.of(stage).forward_s
            wait = wait._replace(end_s=max(wait.end_s, there_s + left_s))
        waits[lane][point.action] = wait

    lanes = lanes_of_buckets((gather.bucket for gather in gathers), simulated.lane_of_rank)
    for gather in gathers:
        for lane in lanes[gather.bucket.ranks]:
            there_s = gather.end_s
            if hosts.keeps(lane, gather.bucket.position):
                start_s = max(gathered_s.get(lane, there_s), there_s)
                there_s = gathered_s[lane] = start_s + hosts.gathered_out_s(lane, gather.bucket)
                gathered_out[lane].append((start_s, there_s))
            wait_for(lane, gather.bucket.position, there_s)
    for lane, there in alone.items():
        for position, there_s in there:
            wait_for(lane, position, there_s)
    return {
        lane: LaneStart(
            at_s=at_s,
            copies=behind_updates(copies.get(lane, ()), whole[lane], gathered_out[lane]),
            weight_waits=tuple(waits[lane].items()),
        )
        for lane, at_s in begin_s.items()
        if at_s or lane in waits or lane in copies
    }


def _prices(
    simulated: SimulatedPlan, topology: Topology, *, bytes_per_element: int, share: float
) -> Callable[[CountedBucket], CollectiveCost]:
    """A function that prices the collective on a bucket: ``share`` of an all-reduce."""

    def price(bucket: CountedBucket) -> CollectiveCost:
        num_bytes = bucket.numel * bytes_per_element

        def priced() -> CollectiveCost:
            whole = all_reduce_cost(num_bytes, bucket.ranks, bucket.domains, topology)
            return whole if share == 1.0 else whole.scaled(share)

        return simulated.known.collectives.of((num_bytes, bucket.ranks, bucket.domains, share), priced)

    return price


def _sum_gradients(
    simulated: SimulatedPlan,
    topology: Topology,
    buckets: Sequence[CountedBucket],
    transfers: Mapping[Port, tuple[TimeInterval, ...]],
    ready_s: Callable[[LaneKey, float], float],
    replays: ReplicaReplays,
) -> tuple[CollectiveSpan, ...]:
    """Run every sum of gradients on what the pipeline's transfers leave of the wires."""
    # What is gathered after the update need only be scattered now, each shard to who updates it.
    share = 0.5 if _gathered(simulated, buckets) else 1.0
    return run_collectives(
        buckets,
        cost_of=_prices(simulated, topology, bytes_per_element=simulated.costs.gradient_bytes, share=share),
        ready_s=ready_s,
        lane_of_rank=_replayed_lanes(simulated, replays),
        transfers=transfers,
    ).spans


def _replayed_lanes(simulated: SimulatedPlan, replays: ReplicaReplays) -> Mapping[int, LaneKey]:
    """By rank a lane that has its gradients at the same times: the one that was replayed for it, if it can be."""
    found = {}
    for lane in simulated.lane_keys():
        twin = lane._replace(replica=replays.alike[lane.replica])
        found[lane] = twin if simulated.group(twin).points is simulated.group(lane).points else lane
    return {rank: found[lane] for rank, lane in simulated.lane_of_rank.items()}


def _result(
    plan: Plan,
    simulated: SimulatedPlan,
    replays: ReplicaReplays,
    syncs: tuple[CollectiveSpan, ...],
    gathers: tuple[CollectiveSpan, ...],
    transfers: Mapping[Port, tuple[TimeInterval, ...]],
    *,
    on_host_s: float = 0.0,
) -> Simulation:
    computed = {lane: replays.end_s(lane) for lane in simulated.lane_keys()}
    summed = _summed(simulated, computed, syncs, on_host_s=on_host_s)
    updates = {lane: simulated.group(lane).update_s for lane in computed}
    step_s = max(summed[lane] + updates[lane] for lane in summed)
    if simulated.costs.runtime.waits_for_all_before_update:
        # From one agreement of all ranks to the next one: it began with the update that ended first at 0.
        step_s = max(summed.values()) + min(updates.values())
    return Simulation(
        plan=plan,
        step_s=step_s,
        compute_end_s=max(computed.values()),
        confidence=max(cost.confidence for cost in simulated.stage_costs.values()),
        stages=LazyStageTimes(partial(_stage_times, simulated, replays, computed, summed, step_s)),
        costs=simulated.stage_costs,
        spans=Spans(replays),
        alike=replays.alike,
        syncs=syncs,
        transfers=transfers,
        gathers=gathers,
        simulated_plan=simulated,
        replays=replays,
    )


def _summed(
    simulated: SimulatedPlan,
    computed: Mapping[LaneKey, float],
    syncs: Sequence[CollectiveSpan],
    *,
    on_host_s: float,
) -> Mapping[LaneKey, float]:
    """When each lane may update its weights.

    Args:
        on_host_s: when all sums that hosts add up are there, for the norm.
    """
    if simulated.costs.runtime.waits_for_all_before_update:
        last_s = max([*computed.values(), *(sync.end_s for sync in syncs), on_host_s])
        return dict.fromkeys(computed, last_s)
    summed = dict(computed)
    lanes = lanes_of_buckets((sync.bucket for sync in syncs), simulated.lane_of_rank)
    for sync in syncs:
        for lane in lanes[sync.bucket.ranks]:
            summed[lane] = max(summed[lane], sync.end_s)
    return summed


def _stage_times(
    simulated: SimulatedPlan,
    replays: ReplicaReplays,
    computed: Mapping[LaneKey, float],
    summed: Mapping[LaneKey, float],
    step_s: float,
) -> Mapping[StageKey, StageTimes]:
    begin_s = _begins(simulated)
    found: dict[StageKey, StageTimes] = {}
    for r, groups in enumerate(simulated.groups):
        for g, group in enumerate(groups):
            lanes = []
            for number, share in enumerate(group.weights):
                lane = LaneKey(r, g, number)
                times = RankTimes(
                    begin_s=begin_s[lane],
                    computed_s=computed[lane],
                    summed_s=summed[lane],
                    busy_s=replays.busy_s(lane),
                    update_s=group.update_s,
                    exposed_s=replays.exposed_s(lane),
                )
                lanes.append((share, times))
            mean = mean_times(lanes, step_s=step_s)
            found |= {(r, s): mean for s in group.stages}
    return found
