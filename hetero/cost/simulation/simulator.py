"""Replays a plan: the action lists that the runtime runs, with predicted durations, on shared wires.

A step of steady training lasts from the moment at which all ranks have agreed on the gradients' norm to the next such
moment:

    update, gathers of the updated weights, forwards and backwards, sums of gradients

Second 0 is the end of the first update. Each device group starts when it has its own, and with a distributed optimizer
its first forwards wait for the weights that are gathered; the pipeline starts empty and ends empty. Where a runtime
does not wait for all before the update, every replica starts at 0 and the step ends with the last update. Reading data,
evaluation and checkpoints are not in it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from hetero.cost.gradient_volume import CountedBucket, sync_buckets
from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.latency import CostModel, StageCost
from hetero.cost.network import Port, SumCost, Topology, sum_cost
from hetero.cost.simulation.collectives import CollectiveRun, CollectiveSpan, parties_of, run_collectives
from hetero.cost.simulation.engine import NO_CAUSE, Hold, LaneStart, Span
from hetero.cost.simulation.exposed_communication import TimeInterval
from hetero.cost.simulation.gradient_ready import share_of_backward, share_of_forward
from hetero.cost.simulation.layout import Layout, Party
from hetero.cost.simulation.replica_replays import ReplicaReplays, Spans
from hetero.plan.ir import GradientSyncPlan, Plan, StageKey
from hetero.plan.lowering import launch_order
from hetero.schedule.actions import SEND, Action, ActionKind
from hetero.spec.cluster import ClusterSpec


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the step goes on the ranks of one stage. Busy, bubble, sync, update and rest add up to the step.

    They are means over the ranks. Ranks that hold several stages have one account of all of them, which each of these
    stages shows.

    busy_s: forwards and backwards.
    bubble_s: waiting before the end of the last backward, for neighbours, for their transfers or for weights.
    sync_s: from there until its last gradient is summed and the update may start.
    update_s: the update.
    rest_s: waiting for others after that.
    exposed_s: the part of the bubble in which what was waited for was on the wire from a neighbour.
    """

    busy_s: float
    bubble_s: float
    sync_s: float
    update_s: float
    rest_s: float
    exposed_s: float


class RankTimes(NamedTuple):
    """A rank's moments of a step, and how long it computed and stood still for the wire, in seconds.

    begin_s: the end of the update before.
    computed_s: the end of its last backward.
    summed_s: when its next update may start.
    """

    begin_s: float
    computed_s: float
    summed_s: float
    busy_s: float
    update_s: float
    exposed_s: float


def mean_times(ranks: Sequence[tuple[float, RankTimes]], *, step_s: float) -> StageTimes:
    """The account of ranks that each stand for a share of a device group; the shares add up to 1."""
    ((_, mean), *others) = ranks
    if others:
        mean = RankTimes(*(sum(share * times[i] for share, times in ranks) for i in range(len(RankTimes._fields))))
    bubble_s = mean.computed_s - mean.begin_s - mean.busy_s
    sync_s = mean.summed_s - mean.computed_s
    return StageTimes(
        busy_s=mean.busy_s,
        bubble_s=bubble_s,
        sync_s=sync_s,
        update_s=mean.update_s,
        # Nothing but rounding where all update together.
        rest_s=max(0.0, step_s - mean.busy_s - bubble_s - sync_s - mean.update_s),
        exposed_s=mean.exposed_s,
    )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a step of a plan is predicted to be.

    step_s: seconds of one step on the global batch.
    compute_end_s: when the last backward of all stages ends.
    confidence: the worst of the times it rests on.
    spans: computes and transfers of all lanes of the replicas that were replayed.
    alike: for each replica, the one whose spans it shares: replicas in equal circumstances are replayed once.
    syncs: the sums of gradients, in the order in which they were ready.
    transfers: when the pipeline uses each direction of each interface, once a first stage is in its last backward.
    gathers: of updated weights, in the order in which they were ready.
    layout, course: what it was read from, for the same pipeline with other sums; ``None`` of a step that was executed.
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
    layout: Layout | None = field(default=None, compare=False, repr=False)
    course: ReplicaReplays | None = field(default=None, compare=False, repr=False)

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
        return idle / working

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
        """When the ranks of a stage had the update before; at 0 the first ones."""
        if self.layout is not None and not self.layout.costs.runtime.waits_for_all_before_update:
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


def simulate(plan: Plan, cluster: ClusterSpec | Topology, costs: CostModel) -> Simulation:
    """Replay one step of ``plan``, which has passed the validator, on ``cluster`` under ``costs.runtime``.

    Raises:
        ConfigError: a device has no profile, or two ranks that talk to one another no link.
        PlanError: stages count different microbatches, split their backward or share their ranks, and the runtime of
            ``costs.runtime`` cannot do that.
        ScheduleError: the depths deadlock.
    """
    topology = cluster if isinstance(cluster, Topology) else Topology(cluster)
    layout = Layout(plan, costs)
    buckets = _buckets(plan, costs)
    begin_s = _begins(layout)
    gathers = _gather_weights(layout, topology, buckets, begin_s)
    starts = _lane_starts(layout, begin_s, gathers.spans)
    course = ReplicaReplays(
        layout.pipelines(topology, starts), blocking=costs.runtime.blocking_transfers, free_s=gathers.free_s
    )
    return _result(plan, layout, topology, course, buckets, gathers.spans, course.late_transfers())


def with_gradient_sync(
    simulation: Simulation, gradient_sync: GradientSyncPlan, topology: Topology, costs: CostModel
) -> Simulation:
    """The prediction for a plan that sums its gradients otherwise. What comes before the sums stays what it is, unless
    a distributed optimizer gathers the same buckets: then the step is replayed.

    Raises:
        ConfigError: two ranks that sum gradients have no link.
    """
    plan = replace(simulation.plan, gradient_sync=gradient_sync)
    if simulation.gathers or simulation.layout is None or simulation.course is None:
        return simulate(plan, topology, costs)
    return _result(
        plan, simulation.layout, topology, simulation.course, _buckets(plan, costs), (), simulation.transfers
    )


def _buckets(plan: Plan, costs: CostModel) -> tuple[CountedBucket, ...]:
    return sync_buckets(plan, bucket_numel=plan.gradient_sync.bucket_numel or costs.runtime.bucket_numel)


def _begins(layout: Layout) -> dict[Party, float]:
    """When each party has updated its weights. Second 0 is when the first one has."""
    if not layout.costs.runtime.waits_for_all_before_update:
        return dict.fromkeys(layout.parties(), 0.0)
    updates = {party: layout.group(party).update_s for party in layout.parties()}
    first_s = min(updates.values())
    return {party: update_s - first_s for party, update_s in updates.items()}


def _gathered(layout: Layout, buckets: Sequence[CountedBucket]) -> Sequence[CountedBucket]:
    """What is gathered behind the update, where all update at once."""
    return launch_order(layout.plan, buckets)[1] if layout.costs.runtime.waits_for_all_before_update else ()


def _gather_weights(
    layout: Layout, topology: Topology, buckets: Sequence[CountedBucket], begin_s: Mapping[Party, float]
) -> CollectiveRun:
    """Bring the updated weights to all that hold them. All gathers are launched behind the update, before anything of
    the pipeline."""
    return run_collectives(
        _gathered(layout, buckets),
        cost_of=_prices(layout, topology, bytes_per_element=layout.costs.element_bytes, part=0.5),
        ready_s=lambda party, _: begin_s[party],
        party_of=layout.party_of,
    )


def _lane_starts(
    layout: Layout, begin_s: Mapping[Party, float], gathers: Sequence[CollectiveSpan]
) -> dict[Party, LaneStart]:
    """When each party starts its first compute at the earliest, and which forwards wait for their weights."""
    holds: dict[Party, dict[Action, Hold]] = defaultdict(dict)
    parties = parties_of((gather.bucket for gather in gathers), layout.party_of)
    for gather in gathers:
        for party in parties[gather.bucket.ranks]:
            point = layout.group(party).points.weights_needed(gather.bucket.position)
            held = holds[party].get(point.action, Hold(0.0, 0.0))
            stage = layout.stage_of(party, point)
            share = share_of_forward(layout.costs, stage, point.position) if point.position is not None else 0.0
            if share == 0.0:
                held = held._replace(start_s=max(held.start_s, gather.end_s))
            else:
                left_s = (1.0 - share) * layout.costs.of(stage).forward_s
                held = held._replace(end_s=max(held.end_s, gather.end_s + left_s))
            holds[party][point.action] = held
    return {
        party: LaneStart(at_s=at_s, holds=tuple(holds[party].items()))
        for party, at_s in begin_s.items()
        if at_s or party in holds
    }


def _prices(
    layout: Layout, topology: Topology, *, bytes_per_element: int, part: float
) -> Callable[[CountedBucket], SumCost]:
    """What a collective on a bucket costs: ``part`` of an all-reduce, one price for buckets of one size."""
    host_gb_per_s = layout.costs.runtime.sync_host_gb_per_s
    known: dict[tuple[int, tuple[int, ...]], SumCost] = {}

    def price(bucket: CountedBucket) -> SumCost:
        key = bucket.numel, bucket.ranks
        if key not in known:
            num_bytes = bucket.numel * bytes_per_element
            whole = sum_cost(num_bytes, bucket.ranks, bucket.domains, topology, host_gb_per_s=host_gb_per_s)
            known[key] = whole if part == 1.0 else whole.part(part)
        return known[key]

    return price


def _sum_gradients(
    layout: Layout,
    topology: Topology,
    course: ReplicaReplays,
    buckets: Sequence[CountedBucket],
    transfers: Mapping[Port, tuple[TimeInterval, ...]],
) -> tuple[CollectiveSpan, ...]:
    """Run every sum of gradients on what the pipeline's transfers leave of the wires."""

    # What is gathered after the update need only be scattered now, each shard to who updates it.
    part = 0.5 if _gathered(layout, buckets) else 1.0

    @cache
    def ready_s(party: Party, position: float) -> float:
        point = layout.group(party).points.gradients_ready(position)
        start_s, end_s = course.interval(party, point.action)
        if point.position is None:
            return end_s
        stage = layout.stage_of(party, point)
        return start_s + (end_s - start_s) * share_of_backward(layout.costs, stage, point.position, point.action.kind)

    return run_collectives(
        buckets,
        cost_of=_prices(layout, topology, bytes_per_element=layout.costs.gradient_bytes, part=part),
        ready_s=ready_s,
        party_of=_alike_parties(layout, course),
        transfers=transfers,
    ).spans


def _alike_parties(layout: Layout, course: ReplicaReplays) -> Mapping[int, Party]:
    """By rank a party that has its gradients at the same times: the one whose course it shares, if it can be."""
    found = {}
    for party in layout.parties():
        twin = party._replace(replica=course.alike[party.replica])
        found[party] = twin if layout.group(twin).points is layout.group(party).points else party
    return {rank: found[party] for rank, party in layout.party_of.items()}


def _result(
    plan: Plan,
    layout: Layout,
    topology: Topology,
    course: ReplicaReplays,
    buckets: Sequence[CountedBucket],
    gathers: tuple[CollectiveSpan, ...],
    transfers: Mapping[Port, tuple[TimeInterval, ...]],
) -> Simulation:
    syncs = _sum_gradients(layout, topology, course, buckets, transfers)
    computed = {party: course.end_s(party) for party in layout.parties()}
    summed = _summed(layout, computed, syncs)
    updates = {party: layout.group(party).update_s for party in computed}
    step_s = max(summed[party] + updates[party] for party in summed)
    if layout.costs.runtime.waits_for_all_before_update:
        # From one agreement of all ranks to the next one: it began with the update that ended first at 0.
        step_s = max(summed.values()) + min(updates.values())
    return Simulation(
        plan=plan,
        step_s=step_s,
        compute_end_s=max(computed.values()),
        confidence=max(cost.confidence for cost in layout.stage_costs.values()),
        stages=_stage_times(layout, course, computed, summed, step_s),
        costs=layout.stage_costs,
        spans=Spans(course),
        alike=course.alike,
        syncs=syncs,
        transfers=transfers,
        gathers=gathers,
        layout=layout,
        course=course,
    )


def _summed(layout: Layout, computed: Mapping[Party, float], syncs: Sequence[CollectiveSpan]) -> Mapping[Party, float]:
    """When each party may update its weights."""
    if layout.costs.runtime.waits_for_all_before_update:
        last_s = max([*computed.values(), *(sync.end_s for sync in syncs)])
        return dict.fromkeys(computed, last_s)
    summed = dict(computed)
    holders = parties_of((sync.bucket for sync in syncs), layout.party_of)
    for sync in syncs:
        for party in holders[sync.bucket.ranks]:
            summed[party] = max(summed[party], sync.end_s)
    return summed


def _stage_times(
    layout: Layout,
    course: ReplicaReplays,
    computed: Mapping[Party, float],
    summed: Mapping[Party, float],
    step_s: float,
) -> Mapping[StageKey, StageTimes]:
    begin_s = _begins(layout)
    found: dict[StageKey, StageTimes] = {}
    for r, groups in enumerate(layout.groups):
        for g, group in enumerate(groups):
            lanes = []
            for lane, share in enumerate(group.weights):
                party = Party(r, g, lane)
                times = RankTimes(
                    begin_s=begin_s[party],
                    computed_s=computed[party],
                    summed_s=summed[party],
                    busy_s=course.busy_s(party),
                    update_s=group.update_s,
                    exposed_s=course.exposed_s(party),
                )
                lanes.append((share, times))
            account = mean_times(lanes, step_s=step_s)
            found |= {(r, s): account for s in group.stages}
    return found
