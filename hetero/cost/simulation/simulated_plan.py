"""A plan as the simulator needs it: device groups with their rows, lanes, seconds and points of collectives."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from hetero.cost.cost_model import CostModel, StageCost
from hetero.cost.gradient_volume import CountedBucket, OwnedParameters, owned_parameters
from hetero.cost.network import CollectiveCost, Topology, transfer_cost
from hetero.cost.simulation.engine import LaneStart, Pipeline, Replay, Slice
from hetero.cost.simulation.lanes import lanes_of, messages_by_lanes, one_lane_each
from hetero.cost.simulation.recent import Recent
from hetero.cost.simulation.resolved_rows import ResolvedRow
from hetero.plan.ir import Plan, Replica, Stage, StageKey
from hetero.plan.lowering import CollectiveOptions, CollectivePoints, collective_options
from hetero.plan.reshard import num_phases
from hetero.schedule.actions import Row, Schedule
from hetero.schedule.program import Point

MOST_SMALL = 1 << 14
"""Small parts that are kept of simulations: what a slice or the sum of a bucket costs. A heuristic."""


class LaneKey(NamedTuple):
    """Which lane: indices of replica, device group and lane."""

    replica: int
    group: int
    lane: int


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """The ranks that share a row, as the simulator needs them.

    stages: their numbers.
    row: of the replica's rows, its own.
    lanes: of its data-parallel ranks.
    update_s: of the weights of all its stages.
    points: the same object for groups of the same layers, devices and row.
    """

    stages: tuple[int, ...]
    row: Row
    lanes: tuple[int, ...]
    update_s: float
    points: CollectivePoints

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The share of the group's ranks in each lane."""
        return tuple(self.lanes.count(lane) / len(self.lanes) for lane in range(max(self.lanes) + 1))


class KnownParts:
    """Parts of simulated steps that another plan may have as well: what a small change leaves as it was is not made
    again.

    They are kept by all that determines them, so that a step has the same seconds with them as without. Model, costs
    and cluster are none of that: all plans that share known parts have the same.

    most: of each kind, but for small ones.
    """

    def __init__(self, most: int = 1) -> None:
        self.rows: Recent[Schedule] = Recent(most)
        self.points: Recent[tuple[Row, CollectivePoints]] = Recent(8 * most)
        self.resolved: Recent[ResolvedRow] = Recent(8 * most)
        self.replays: Recent[tuple[Sequence[Pipeline], Replay]] = Recent(most)
        self.slices: Recent[tuple[Slice, ...]] = Recent(MOST_SMALL)
        self.buckets: Recent[tuple[CountedBucket, ...]] = Recent(most)
        self.collectives: Recent[CollectiveCost] = Recent(MOST_SMALL)


class SimulatedPlan:
    """The device groups of ``plan``, replica after replica, under ``costs.runtime``, and the lane of every rank.

    known: what other plans of the same model, costs and cluster have in common with it.

    Raises:
        PlanError: the runtime cannot execute the plan.
        ScheduleError: the depths deadlock.
    """

    def __init__(self, plan: Plan, costs: CostModel, known: KnownParts) -> None:
        self.plan = plan
        self.costs = costs
        self.known = known
        self.stage_costs: dict[StageKey, StageCost] = {(r, s): costs.of(stage) for r, s, stage in plan.stages()}
        self.groups: list[list[DeviceGroup]] = []
        self.lane_of_rank: dict[int, LaneKey] = {}
        self._owned = owned_parameters(plan) if plan.distributed_optimizer else None
        self._options = collective_options(
            plan,
            overlap_grad_reduce=costs.runtime.overlaps_gradient_sync,
            overlap_param_gather=costs.runtime.overlaps_param_gather,
        )
        # Of replicas in one plan that are alike these are the same objects.
        self._rows: dict[object, Schedule] = {}
        self._points: dict[object, CollectivePoints] = {}
        for r, replica in enumerate(plan.replicas):
            self._add(r, replica)

    def lane_keys(self) -> Iterator[LaneKey]:
        """The lanes of all device groups."""
        for r, groups in enumerate(self.groups):
            for g, group in enumerate(groups):
                for lane in range(len(group.weights)):
                    yield LaneKey(r, g, lane)

    def group(self, lane: LaneKey) -> DeviceGroup:
        """The device group of a lane."""
        return self.groups[lane.replica][lane.group]

    def _add(self, r: int, replica: Replica) -> None:
        runtime, stages = self.costs.runtime, replica.stages
        device_groups = replica.device_groups
        depths = tuple((stage.in_flight, stage.wgrad_delay) for stage in stages)
        order = replica.schedule, replica.microbatch_counts, depths, device_groups if replica.is_interleaved else None
        if order not in self._rows:
            self._rows[order] = self.known.rows.of(order, lambda: runtime.rows(replica))
        of_groups = one_lane_each(replica) if runtime.blocking_transfers else lanes_of(replica)
        groups = []
        for g, (numbers, row, lanes) in enumerate(zip(device_groups, self._rows[order], of_groups, strict=True)):
            first = stages[numbers[0]]
            kind = first.device, first.tp, first.micro_batch_size, first.fp8
            cuts = order, numbers, kind, tuple((stages[s].start, stages[s].end) for s in numbers)
            if cuts not in self._points:
                _, self._points[cuts] = self.known.points.of(
                    (id(row), *cuts[1:], tuple(stages[s].offload for s in numbers), self._options),
                    partial(_with_points, replica, numbers, row, self._options),
                )
            update_s = max(
                update_seconds(self.plan, self.costs, self._owned, stages=[(r, s) for s in numbers], rank=rank)
                for rank in (first.ranks if self._owned is not None else first.ranks[:1])
            )
            groups.append(
                DeviceGroup(stages=numbers, row=row, lanes=lanes, update_s=update_s, points=self._points[cuts])
            )
            keys = [LaneKey(r, g, lane) for lane in range(max(lanes) + 1)]
            for i, rank in enumerate(first.ranks):
                self.lane_of_rank[rank] = keys[lanes[i // first.tp]]
        self.groups.append(groups)

    def stage_of(self, lane: LaneKey, point: Point) -> Stage:
        """The stage whose compute ``point`` lies in, of the replica of ``lane``."""
        return self.plan.replicas[lane.replica].stages[point.action.stage]

    def pipelines(self, topology: Topology, starts: dict[LaneKey, LaneStart]) -> list[Pipeline]:
        """The replicas as the engine takes them.

        Args:
            starts: of the lanes that do not start at 0, or wait for weights.

        Raises:
            ConfigError: two ranks that talk to one another have no link.
        """
        return [self._pipeline(r, topology, starts) for r in range(len(self.plan.replicas))]

    def _pipeline(self, r: int, topology: Topology, starts: dict[LaneKey, LaneStart]) -> Pipeline:
        replica, groups = self.plan.replicas[r], self.groups[r]
        lanes = {s: group.lanes for group in groups for s in group.stages}
        row_bytes = self.plan.model.hidden_size * self.costs.element_bytes
        host_s = self.costs.runtime.transfer_host_s

        def slices(sender: int, receiver: int) -> tuple[Slice, ...]:
            here, there = replica.stages[sender], replica.stages[receiver]
            gathers = self.costs.runtime.partitions_transfers and here.tp == there.tp and not here.splits_sequence
            if gathers:
                here, there = (dataclasses.replace(stage, sequence_parallel=True) for stage in (here, there))
            found: list[Slice] = []
            for phase in range(num_phases(here, there)):
                by_lanes = messages_by_lanes(
                    here,
                    there,
                    (lanes[sender], lanes[receiver]),
                    seq_length=self.plan.seq_length,
                    phase=phase,
                )
                found.append(
                    {
                        pair: transfer_cost(
                            messages, topology, row_bytes=row_bytes, gathers_over=there.tp * gathers
                        ).later(host_s)
                        for pair, messages in by_lanes.items()
                    }
                )
            return tuple(found)

        def known_slices(sender: int, receiver: int) -> tuple[Slice, ...]:
            ends = ((replica.stages[s], lanes[s]) for s in (sender, receiver))
            key = tuple(
                (stage.ranks, stage.tp, stage.dp, stage.micro_batch_size, stage.splits_sequence, of_stage)
                for stage, of_stage in ends
            )
            return self.known.slices.of(key, lambda: slices(sender, receiver))

        of_stages = [self.stage_costs[r, s] for s in range(len(replica.stages))]
        at_zero = LaneStart()
        return Pipeline(
            rows=[group.row for group in groups],
            num_microbatches=replica.microbatch_counts,
            forward_s=tuple(cost.forward_s for cost in of_stages),
            backward_s=tuple(cost.undelayed_backward_s for cost in of_stages),
            weight_s=tuple(cost.weight_s for cost in of_stages),
            forward=tuple(known_slices(s, t) for s, t in pairwise(range(len(of_stages)))),
            backward=tuple(known_slices(t, s) for s, t in pairwise(range(len(of_stages)))),
            lanes=tuple(
                tuple(starts.get(LaneKey(r, g, lane), at_zero) for lane in range(len(group.weights)))
                for g, group in enumerate(groups)
            ),
        )


def _with_points(
    replica: Replica, stages: tuple[int, ...], row: Row, options: CollectiveOptions
) -> tuple[Row, CollectivePoints]:
    return row, CollectivePoints(replica, stages, row, options)


def update_seconds(
    plan: Plan,
    costs: CostModel,
    owned: Mapping[int, Mapping[int, OwnedParameters]] | None,
    *,
    stages: Sequence[StageKey],
    rank: int,
) -> float:
    """Seconds of the update of these stages on the device of ``rank``, of all that it holds or of what it owns there.

    Args:
        owned: of a plan with a distributed optimizer (:func:`.owned_parameters`).
    """
    seconds = 0.0
    for r, s in stages:
        stage = plan.replicas[r].stages[s]
        update_s = costs.of(stage).update_s
        if owned is not None:
            held = costs.parameters_per_rank(
                device=stage.device, first_layer=stage.start, end_layer=stage.end, tp=stage.tp
            )
            update_s *= owned[rank][s].on_device / held
        seconds += update_s
    return seconds
