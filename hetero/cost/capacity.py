"""Does every stage of a plan fit the memory of its devices? The verdict on what :mod:`hetero.cost.memory` predicts."""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero.cost.latency import CostModel
from hetero.cost.memory import MemoryParts, memory_costs, plan_memory
from hetero.errors import PlanError, PlanMemoryError
from hetero.plan.ir import Plan, Stage
from hetero.plan.validate import least_in_flight, validate
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB

StageKey = tuple[int, int]
"""Replica and stage."""

LARGEST_SHOWN = 3
"""Parts of a stage's memory that a message names."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A stage whose devices have fewer bytes than it takes at its peak."""

    key: StageKey
    needed: MemoryParts
    capacity_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed.total - self.capacity_bytes


def capacity_bytes(stage: Stage, cluster: ClusterSpec) -> int | None:
    """Memory of one device of ``stage``; ``None`` where nobody knows it."""
    memory_gib = cluster.device_of_rank(stage.ranks[0]).memory_gib
    return None if memory_gib is None else memory_gib * GIB


def check_memory(plan: Plan, cluster: ClusterSpec) -> None:
    """Raise unless every stage of ``plan``, which has passed the other checks, fits its devices in ``cluster``.

    Devices whose memory nobody knows hold everything.

    Raises:
        PlanMemoryError: naming the stage that lacks most, the bytes, and a change with which it would fit.
    """
    costs = memory_costs(plan)
    if (error := memory_error(plan, cluster, costs, plan_memory(plan, costs))) is not None:
        raise error


def memory_error(
    plan: Plan, cluster: ClusterSpec, costs: CostModel, memory: Mapping[StageKey, MemoryParts]
) -> PlanMemoryError | None:
    """What :func:`check_memory` raises, for a plan whose ``memory`` is known."""
    short = [
        Shortage((r, s), memory[r, s], capacity)
        for r, s, stage in plan.stages()
        if (capacity := capacity_bytes(stage, cluster)) is not None and memory[r, s].total > capacity
    ]
    if not short:
        return None
    worst = max(short, key=lambda each: each.missing_bytes)
    r, s = worst.key
    stage = plan.replicas[r].stages[s]
    parts = sorted(worst.needed.named().items(), key=lambda part: -part[1])[:LARGEST_SHOWN]
    largest = ", ".join(f"{name.replace('_', ' ')} {count / GIB:.2f}" for name, count in parts)
    others = f" (so do {len(short) - 1} more stages)" if len(short) > 1 else ""
    needed, has = (f"{count} bytes ({count / GIB:.2f} GiB)" for count in (worst.needed.total, worst.capacity_bytes))
    return PlanMemoryError(
        f"replica {r} stage {s} does not fit its devices{others}: each {stage.device} of ranks "
        f"{number_ranges(stage.ranks)} needs {needed} and has {has}; most of it, in GiB: {largest}; "
        + _remedy(plan, worst, costs)
    )


def _remedy(plan: Plan, shortage: Shortage, costs: CostModel) -> str:
    """The first change of one thing with which the stage fits, or what else there is."""

    def fits(changed: Plan) -> bool:
        try:
            validate(changed)
        except PlanError:
            return False  # Smaller microbatches may need more of them in flight, for instance.
        return plan_memory(changed, costs)[shortage.key].total <= shortage.capacity_bytes

    for change, changed in _changes(plan, shortage.key, fits):
        if fits(changed):
            return f"it fits with {change}"
    return "give it fewer layers or more tp, together with recompute full and smaller microbatches, or larger devices"


def _changes(plan: Plan, key: StageKey, fits: Callable[[Plan], bool]) -> Iterator[tuple[str, Plan]]:
    """Changes of one thing, those that cost least time first; of depths the largest that ``fits``."""
    r, s = key
    replica = plan.replicas[r]
    stage = replica.stages[s]

    def with_stages(stages: Sequence[Stage]) -> Plan:
        changed = dataclasses.replace(replica, stages=tuple(stages))
        return dataclasses.replace(plan, replicas=(*plan.replicas[:r], changed, *plan.replicas[r + 1 :]))

    def with_stage(changed: Stage) -> Plan:
        return with_stages((*replica.stages[:s], changed, *replica.stages[s + 1 :]))

    if not plan.distributed_optimizer:
        yield "distributed_optimizer true in the plan", dataclasses.replace(plan, distributed_optimizer=True)
    if stage.weight_lag is not None:
        yield "weight_lag null", with_stage(dataclasses.replace(stage, weight_lag=None))
    shallower = [
        (depth, with_stage(dataclasses.replace(stage, in_flight=depth)))
        for depth in range(least_in_flight(replica, s), min(stage.in_flight, replica.num_microbatches(s)))
    ]
    if fitting := bisect.bisect_left(shallower, True, key=lambda each: not fits(each[1])):
        depth, changed = shallower[fitting - 1]
        yield f"in_flight {depth}", changed
    if stage.recompute == "none":
        yield "recompute selective", with_stage(dataclasses.replace(stage, recompute="selective"))
    smaller = replica.stages
    while all(each.micro_batch_size % 2 == 0 for each in smaller):
        smaller = tuple(dataclasses.replace(each, micro_batch_size=each.micro_batch_size // 2) for each in smaller)
        others = ", and as much less in the other stages" if len(smaller) > 1 else ""
        yield f"micro_batch_size {smaller[s].micro_batch_size}{others}", with_stages(smaller)
    if stage.recompute != "full" or stage.recompute_num_layers is not None:
        full = dataclasses.replace(stage, recompute="full", recompute_num_layers=None, weight_lag=None)
        yield "recompute full", with_stage(full)
