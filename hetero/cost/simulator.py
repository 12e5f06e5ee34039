"""Replays a plan: the action lists that the runtime runs, with predicted durations, on shared wires.

    step = last backwards and sums of gradients, as far as they are not hidden + update of the weights

Every replica starts at 0 with an empty pipeline and ends with empty gradients; reading data, evaluation and
checkpoints are not in it.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise

from hetero.cost.basis import Basis
from hetero.cost.engine import NO_CAUSE, Pipeline, Span, replay
from hetero.cost.exposure import Interval, exposed_s
from hetero.cost.gradients import SyncBucket, sync_buckets
from hetero.cost.latency import CostModel, StageCost
from hetero.cost.network import (
    Port,
    SumCost,
    Topology,
    TransferCost,
    all_reduce_cost,
    slice_costs,
    two_level_cost,
)
from hetero.cost.readiness import share_of_backward
from hetero.cost.sums import SyncSpan, run_sums
from hetero.cost.traits import RuntimeTraits
from hetero.errors import PlanError
from hetero.plan.ir import GradientSyncPlan, Plan, Replica, Stage
from hetero.plan.lowering import step_rows
from hetero.schedule.actions import BACKWARD, COMPUTE, Kind, Schedule
from hetero.schedule.orders import lock_step
from hetero.spec.cluster import ClusterSpec

StageKey = tuple[int, int]
"""Replica and stage."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the step goes on one stage. Busy, bubble, sync, update and rest add up to the step.

    busy_s: forwards and backwards.
    bubble_s: waiting before the end of the stage's last backward, for neighbours or their transfers.
    sync_s: from there until its last gradient is summed and the update may start.
    update_s: the update.
    rest_s: waiting for others after that.
    exposed_s: the part of the bubble in which what the stage waited for was on the wire.
    """

    busy_s: float
    bubble_s: float
    sync_s: float
    update_s: float
    rest_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a step of a plan is predicted to be.

    step_s: seconds of one step on the global batch.
    compute_end_s: when the last backward of all stages ends.
    basis: the worst of the times it rests on.
    alike: for each replica, the one whose spans it shares: replicas in equal circumstances are replayed once.
    syncs: the sums of gradients, in the order in which they were ready.
    transfers: when the pipeline uses each direction of each interface, once a first stage is in its last backward.
    """

    plan: Plan
    step_s: float
    compute_end_s: float
    basis: Basis
    stages: Mapping[StageKey, StageTimes]
    costs: Mapping[StageKey, StageCost]
    spans: tuple[Span, ...]
    alike: tuple[int, ...]
    syncs: tuple[SyncSpan, ...]
    transfers: Mapping[Port, tuple[Interval, ...]]

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
        for r, s, stage in self.plan.stages():
            times = self.stages[r, s]
            working += len(stage.ranks) * self.step_s
            idle += len(stage.ranks) * (self.step_s - times.busy_s - times.update_s)
        return idle / working

    @cached_property
    def _spans_of_replica(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.replica].append(span)
        return found

    def spans_of(self, replica: int) -> list[Span]:
        """The computes and transfers of a replica; their ``replica`` is the one whose spans it shares."""
        return self._spans_of_replica[self.alike[replica]]

    def in_flight(self, replica: int, stage: int) -> list[tuple[float, int]]:
        """(second, microbatches whose activations are held from then on) of one stage, in order of time."""
        return self._held(replica, stage, until=BACKWARD)

    def held(self, replica: int, stage: int) -> list[tuple[float, int]]:
        """As :meth:`in_flight`, with those that wait for their weights' gradients after a split backward."""
        splits = self.plan.replicas[replica].stages[stage].weight_lag is not None
        return self._held(replica, stage, until={Kind.W} if splits else BACKWARD)

    def _held(self, replica: int, stage: int, *, until: Collection[Kind]) -> list[tuple[float, int]]:
        changes = [
            (span.start_s, 1) if span.kind == Kind.F else (span.end_s, -1)
            for span in self.spans_of(replica)
            if span.stage == stage and (span.kind == Kind.F or span.kind in until)
        ]
        held = 0
        timeline = []
        for at_s, change in sorted(changes):
            held += change
            timeline.append((at_s, held))
        return timeline

    def critical_path(self) -> list[Span]:
        """The chain of computes and transfers without slack that ends with the last compute, first to last."""
        last = max(range(len(self.spans)), key=lambda i: self.spans[i].end_s)
        path = []
        while last != NO_CAUSE:
            path.append(self.spans[last])
            last = self.spans[last].cause
        return path[::-1]


def simulate(plan: Plan, cluster: ClusterSpec | Topology, costs: CostModel) -> Simulation:
    """Replay one step of ``plan``, which has passed the validator, on ``cluster`` under ``costs.traits``.

    Raises:
        ConfigError: a device has no profile, or two ranks that talk to one another no link.
        PlanError: stages count different microbatches or split their backward, and the runtime of ``costs.traits``
            cannot do that.
        ScheduleError: the depths deadlock.
    """
    topology = cluster if isinstance(cluster, Topology) else Topology(cluster)
    stage_costs = {(r, s): costs.of(stage) for r, s, stage in plan.stages()}
    pipelines = _pipelines(plan, topology, costs, stage_costs)
    spans, alike = _replay_once_each(pipelines, blocking=costs.traits.blocking_transfers)
    ends = _Ends(plan, spans, alike)
    transfers = _late_transfers(pipelines, spans, alike, ends)
    syncs = _sync_gradients(plan, topology, costs, ends, transfers)
    return _result(plan, stage_costs, spans, alike, syncs, transfers, ends, costs)


def with_gradient_sync(
    simulation: Simulation, gradient_sync: GradientSyncPlan, topology: Topology, costs: CostModel
) -> Simulation:
    """The prediction for a plan that sums its gradients otherwise; what comes before the sums stays what it is.

    Raises:
        ConfigError: two ranks that sum gradients have no link.
    """
    plan = replace(simulation.plan, gradient_sync=gradient_sync)
    ends = _Ends(plan, simulation.spans, simulation.alike)
    syncs = _sync_gradients(plan, topology, costs, ends, simulation.transfers)
    return _result(plan, simulation.costs, simulation.spans, simulation.alike, syncs, simulation.transfers, ends, costs)


def stage_rows(replica: Replica, traits: RuntimeTraits) -> Schedule:
    """The action lists that a runtime of these traits executes for ``replica``.

    Raises:
        PlanError: under blocking transfers, stages count different microbatches or split their backward.
        ScheduleError: a count is below 1.
    """
    counts = [replica.num_microbatches(s) for s in range(len(replica.stages))]
    if traits.blocking_transfers:
        if len(set(counts)) > 1:
            raise PlanError(f"{traits.name}: stages count {counts} microbatches, this runtime needs equal counts")
        if any(stage.weight_lag is not None for stage in replica.stages):
            raise PlanError(f"{traits.name}: this runtime does not split backwards; set weight_lag to null")
        return lock_step(num_stages=len(counts), num_microbatches=counts[0])
    return step_rows(replica, receives_ahead=traits.receives_ahead)


def _pipelines(
    plan: Plan, topology: Topology, costs: CostModel, stage_costs: Mapping[StageKey, StageCost]
) -> list[Pipeline]:
    row_bytes = plan.model.hidden_size * costs.element_bytes
    rows: dict[tuple[tuple[int, int, int | None], ...], Schedule] = {}

    def slices(sender: Stage, receiver: Stage) -> tuple[TransferCost, ...]:
        return slice_costs(sender, receiver, topology, seq_length=plan.seq_length, row_bytes=row_bytes)

    pipelines = []
    for r, replica in enumerate(plan.replicas):
        counts = tuple(replica.num_microbatches(s) for s in range(len(replica.stages)))
        key = tuple((n, stage.in_flight, stage.weight_lag) for n, stage in zip(counts, replica.stages, strict=True))
        if key not in rows:
            rows[key] = stage_rows(replica, costs.traits)
        of_stages = [stage_costs[r, s] for s in range(len(counts))]
        pipelines.append(
            Pipeline(
                rows=rows[key],
                num_microbatches=counts,
                forward_s=tuple(cost.forward_s for cost in of_stages),
                backward_s=tuple(cost.at_once_s for cost in of_stages),
                weight_s=tuple(cost.weight_s for cost in of_stages),
                forward=tuple(slices(here, after) for here, after in pairwise(replica.stages)),
                backward=tuple(slices(after, here) for here, after in pairwise(replica.stages)),
            )
        )
    return pipelines


def _replay_once_each(pipelines: Sequence[Pipeline], *, blocking: bool) -> tuple[tuple[Span, ...], tuple[int, ...]]:
    """Spans of all different sets of replicas that share interfaces, and for each replica whose spans it has."""
    alike = list(range(len(pipelines)))
    replayed: dict[object, list[int]] = {}
    spans: list[Span] = []
    for members in _sharing_interfaces(pipelines):
        signature = _signature([pipelines[r] for r in members])
        if signature in replayed:
            for r, twin in zip(members, replayed[signature], strict=True):
                alike[r] = twin
            continue
        replayed[signature] = members
        first = len(spans)
        for span in replay([pipelines[r] for r in members], blocking=blocking):
            span.replica = members[span.replica]
            span.cause += first if span.cause != NO_CAUSE else 0
            spans.append(span)
    return tuple(spans), tuple(alike)


def _sharing_interfaces(pipelines: Sequence[Pipeline]) -> list[list[int]]:
    """Replicas in groups, such that no two groups use one interface."""
    groups: list[tuple[set[Port], list[int]]] = []
    for r, pipeline in enumerate(pipelines):
        ports = {port for costs in pipeline.forward + pipeline.backward for cost in costs for port, _ in cost.ports}
        members = [r]
        apart = []
        for used, others in groups:
            if used.isdisjoint(ports):
                apart.append((used, others))
            else:
                ports |= used
                members += others
        groups = [*apart, (ports, sorted(members))]
    return [members for _, members in groups]


def _signature(pipelines: Sequence[Pipeline]) -> object:
    """Equal for sets of replicas that take the same course: everything but the interfaces' names."""
    names: dict[Port, int] = {}

    def anonymous(cost: TransferCost) -> tuple[float, tuple[tuple[int, float], ...]]:
        return cost.seconds, tuple((names.setdefault(port, len(names)), busy_s) for port, busy_s in cost.ports)

    return tuple(
        (
            id(pipeline.rows),
            pipeline.forward_s,
            pipeline.backward_s,
            pipeline.weight_s,
            tuple(tuple(map(anonymous, costs)) for costs in pipeline.forward + pipeline.backward),
        )
        for pipeline in pipelines
    )


class _Ends:
    """When the backwards of each stage end; ``last_weights`` is the last W of a stage that splits its backward."""

    def __init__(self, plan: Plan, spans: Sequence[Span], alike: Sequence[int]) -> None:
        self.busy: dict[StageKey, float] = defaultdict(float)
        self.last_backward: dict[StageKey, Span] = {}
        self.last_weights: dict[StageKey, Span] = {}
        self.exposed_s: dict[StageKey, float] = {}
        computes: dict[StageKey, list[Interval]] = defaultdict(list)
        arrivals: dict[StageKey, list[Interval]] = defaultdict(list)
        for span in spans:
            meant = arrivals if span.receiver != span.stage else computes
            meant[span.replica, span.receiver].append((span.start_s, span.end_s))
            if span.kind in COMPUTE:
                self.busy[span.replica, span.stage] += span.end_s - span.start_s
                if span.kind in BACKWARD:
                    self.last_backward[span.replica, span.stage] = span
                elif span.kind == Kind.W:
                    self.last_weights[span.replica, span.stage] = span
        for r, s, stage in plan.stages():
            self.busy[r, s] = self.busy[alike[r], s]
            if alike[r] == r:
                self.exposed_s[r, s] = exposed_s(computes[r, s], arrivals[r, s])
            else:
                self.exposed_s[r, s] = self.exposed_s[alike[r], s]
            self.last_backward[r, s] = self.last_backward[alike[r], s]
            if stage.weight_lag is not None:
                self.last_weights[r, s] = self.last_weights[alike[r], s]

    def of(self, key: StageKey) -> float:
        """When the stage has computed everything."""
        return self.last_weights.get(key, self.last_backward[key]).end_s


def _late_transfers(
    pipelines: Sequence[Pipeline], spans: Sequence[Span], alike: Sequence[int], ends: _Ends
) -> dict[Port, tuple[Interval, ...]]:
    """When transfers use each interface, from the start of the earliest last backward on: no sum begins before it."""
    first_s = min(span.start_s for span in ends.last_backward.values())
    late: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.end_s > first_s and span.kind in (Kind.SEND_F, Kind.SEND_B):
            late[span.replica].append(span)
    found: dict[Port, list[Interval]] = defaultdict(list)
    for pipeline, twin in zip(pipelines, alike, strict=True):
        for span in late[twin]:
            is_forward = span.kind == Kind.SEND_F
            slices = pipeline.forward[span.stage] if is_forward else pipeline.backward[span.receiver]
            for port, busy_s in slices[span.number % len(slices)].ports:
                found[port].append((span.start_s, span.start_s + busy_s))
    return {port: tuple(intervals) for port, intervals in found.items()}


def _sync_gradients(
    plan: Plan, topology: Topology, costs: CostModel, ends: _Ends, transfers: Mapping[Port, tuple[Interval, ...]]
) -> tuple[SyncSpan, ...]:
    """Run every sum of gradients on what the pipeline's transfers leave of the wires."""
    traits = costs.traits
    place = {rank: (r, s) for r, s, stage in plan.stages() for rank in stage.ranks}
    ready = _GradientsReady(plan, costs, ends)
    complete_s = cache(ready.at)
    known: dict[tuple[int, tuple[int, ...]], SumCost] = {}

    def cost_of(bucket: SyncBucket) -> SumCost:
        key = bucket.numel, bucket.ranks
        if key not in known:
            num_bytes = bucket.numel * costs.gradient_bytes
            host_gb_per_s = traits.sync_host_gb_per_s
            if bucket.domains:
                known[key] = two_level_cost(num_bytes, bucket.domains, topology, host_gb_per_s=host_gb_per_s)
            else:
                flat = all_reduce_cost(num_bytes, bucket.ranks, topology, host_gb_per_s=host_gb_per_s)
                known[key] = SumCost((flat,))
        return known[key]

    return run_sums(
        sync_buckets(plan, bucket_numel=plan.gradient_sync.bucket_numel or traits.bucket_numel),
        cost_of=cost_of,
        complete_s=lambda rank, position: complete_s(place[rank], position),
        transfers=transfers,
    )


class _GradientsReady:
    """When a stage has the last gradient of a layer: within its last backward, or its last W if that has those."""

    def __init__(self, plan: Plan, costs: CostModel, ends: _Ends) -> None:
        self._plan = plan
        self._costs = costs
        self._ends = ends

    def at(self, key: StageKey, position: float) -> float:
        if not self._costs.traits.overlaps_gradient_sync:
            return self._ends.of(key)
        stage = self._plan.replicas[key[0]].stages[key[1]]
        last = self._ends.last_backward[key]
        if position < stage.end:
            last = self._ends.last_weights.get(key, last)
        return last.start_s + (last.end_s - last.start_s) * share_of_backward(self._costs, stage, position, last.kind)


def _result(
    plan: Plan,
    stage_costs: Mapping[StageKey, StageCost],
    spans: tuple[Span, ...],
    alike: tuple[int, ...],
    syncs: tuple[SyncSpan, ...],
    transfers: Mapping[Port, tuple[Interval, ...]],
    ends: _Ends,
    costs: CostModel,
) -> Simulation:
    place = {rank: (r, s) for r, s, stage in plan.stages() for rank in stage.ranks}
    computed = {key: ends.of(key) for key in ends.last_backward}
    summed = dict(computed)
    for sync in syncs:
        for key in {place[rank] for rank in sync.bucket.ranks}:
            summed[key] = max(summed[key], sync.end_s)
    everyone_s = max(summed.values())
    if costs.traits.waits_for_all_before_update:
        summed = dict.fromkeys(summed, everyone_s)
    step_s = max(summed[key] + stage_costs[key].update_s for key in summed)
    stages = {}
    for key, computed_s in computed.items():
        update_s = stage_costs[key].update_s
        stages[key] = StageTimes(
            busy_s=ends.busy[key],
            bubble_s=computed_s - ends.busy[key],
            sync_s=summed[key] - computed_s,
            update_s=update_s,
            rest_s=step_s - summed[key] - update_s,
            exposed_s=ends.exposed_s[key],
        )
    return Simulation(
        plan=plan,
        step_s=step_s,
        compute_end_s=max(computed.values()),
        basis=max(cost.basis for cost in stage_costs.values()),
        stages=stages,
        costs=stage_costs,
        spans=spans,
        alike=alike,
        syncs=syncs,
        transfers=transfers,
    )
