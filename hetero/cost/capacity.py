"""Says whether every device of a plan has the memory for its stages, and what would make it fit.

The bytes are those that :mod:`hetero.cost.memory` predicts.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.cost.cost_model import CostModel
from hetero.cost.host_memory import check_host_memory
from hetero.cost.memory import device_memory, memory_costs, plan_memory
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.errors import PlanError, PlanMemoryError
from hetero.plan.ir import Plan, Stage, StageKey
from hetero.plan.validate import validate
from hetero.schedule.orders import BY_DEPTHS
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB

LARGEST_SHOWN = 3
"""So many of the largest uses of memory are named in a message."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Devices that have fewer bytes than their stages take at the peak.

    key: replica, and the first of the stages.
    stages: that the devices hold.
    """

    key: StageKey
    stages: tuple[int, ...]
    needed: MemoryBreakdown
    capacity_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed.required - self.capacity_bytes


def capacity_bytes(stage: Stage, cluster: ClusterSpec) -> int | None:
    """Memory of one device of ``stage``; ``None`` where nobody knows it."""
    return capacity_of_rank(stage.ranks[0], cluster)


def capacity_of_rank(rank: int, cluster: ClusterSpec) -> int | None:
    """Memory of the device that ``rank`` runs on; ``None`` where nobody knows it."""
    memory_gib = cluster.device_of_rank(rank).memory_gib
    return None if memory_gib is None else memory_gib * GIB


def check_memory(plan: Plan, cluster: ClusterSpec) -> None:
    """Raise unless every stage of ``plan``, which has passed the other checks, fits its devices in ``cluster``, and its
    hosts have room for what it leaves to them.

    Devices whose memory nobody knows hold everything.

    Raises:
        PlanMemoryError: naming the stage that lacks most, the bytes, and a change with which it would fit; or the node
            whose host lacks memory.
    """
    check_host_memory(plan, cluster)
    costs = memory_costs(plan)
    if (error := memory_error(plan, cluster, costs, plan_memory(plan, costs))) is not None:
        raise error


def memory_error(
    plan: Plan, cluster: ClusterSpec, costs: CostModel, memory: Mapping[StageKey, MemoryBreakdown]
) -> PlanMemoryError | None:
    """What :func:`check_memory` raises, for a plan whose ``memory`` is known."""
    devices = device_memory(plan, memory)
    short = [
        Shortage((r, group[0]), group, devices[r, group[0]], capacity)
        for r, replica in enumerate(plan.replicas)
        for group in replica.device_groups
        if (capacity := capacity_bytes(replica.stages[group[0]], cluster)) is not None
        and devices[r, group[0]].required > capacity
    ]
    if not short:
        return None
    worst = max(short, key=lambda each: each.missing_bytes)
    r, s = worst.key
    stage = plan.replicas[r].stages[s]
    uses = sorted(worst.needed.named().items(), key=lambda use: -use[1])[:LARGEST_SHOWN]
    largest = ", ".join(f"{name.replace('_', ' ')} {count / GIB:.2f}" for name, count in uses)
    more = sum(len(each.stages) for each in short) - len(worst.stages)
    others = f" (so do {more} more stages)" if more else ""
    needed, has = (f"{count} bytes ({count / GIB:.2f} GiB)" for count in (worst.needed.required, worst.capacity_bytes))
    what = (
        f"stage {s} does not fit its"
        if len(worst.stages) == 1
        else (f"stages {number_ranges(worst.stages)} together do not fit their")
    )
    return PlanMemoryError(
        f"replica {r} {what} devices{others}: each {stage.device} of ranks "
        f"{number_ranges(stage.ranks)} needs {needed} and has {has}; most of it, in GiB: {largest}; "
        + _remedy(plan, worst, costs)
    )


def _remedy(plan: Plan, shortage: Shortage, costs: CostModel) -> str:
    """The first change of one thing with which the devices hold their stages, or what else there is."""

    def fits(changed: Plan) -> bool:
        # Smaller microbatches may need more of them in flight, for instance, and then are not legal.
        devices = device_memory(changed, plan_memory(changed, costs)) if _is_legal(changed) else None
        return devices is not None and devices[shortage.key].required <= shortage.capacity_bytes

    for change, changed in _changes(plan, shortage, fits):
        if fits(changed):
            return f"it fits with {change}"
    return "give it fewer layers or more tp, together with recompute full and smaller microbatches, or larger devices"


def _changes(plan: Plan, shortage: Shortage, fits: Callable[[Plan], bool]) -> Iterator[tuple[str, Plan]]:
    """Changes of one thing, those that cost least time first; of depths the largest that ``fits``."""
    r, _ = shortage.key
    replica = plan.replicas[r]
    held = {s: replica.stages[s] for s in shortage.stages}

    def with_each(**fields: Sequence[Any]) -> Plan:
        """With these values of these fields in the stages of the devices."""
        changed = replica
        for s, row in zip(held, zip(*fields.values(), strict=True), strict=True):
            changed = changed.with_stage(s, **dict(zip(fields, row, strict=True)))
        return plan.with_replica(r, changed)

    if not plan.distributed_optimizer:
        yield "distributed_optimizer true in the plan", dataclasses.replace(plan, distributed_optimizer=True)
    if any(stage.wgrad_delay is not None for stage in held.values()):
        yield "wgrad_delay null", with_each(wgrad_delay=[None] * len(held))
    if replica.schedule != BY_DEPTHS:
        in_turns = dataclasses.replace(replica, schedule=BY_DEPTHS)
        yield (
            f"schedule {BY_DEPTHS}",
            plan.with_replica(r, in_turns),
        )
    shallower = [
        (depths, with_each(in_flight=depths))
        for depths in _smaller_depths([min(each.in_flight, replica.num_microbatches(s)) for s, each in held.items()])
    ]
    del shallower[: bisect.bisect_left(shallower, True, key=lambda each: _is_legal(each[1]))]
    if fitting := bisect.bisect_left(shallower, True, key=lambda each: not fits(each[1])):
        depths, changed = shallower[fitting - 1]
        yield f"in_flight {' and '.join(map(str, depths))}", changed
    smaller = replica
    while all(each.micro_batch_size % 2 == 0 for each in smaller.stages):
        smaller = smaller.with_each_stage(micro_batch_size=[each.micro_batch_size // 2 for each in smaller.stages])
        others = ", and as much less in the other stages" if len(smaller.stages) > len(held) else ""
        size = smaller.stages[shortage.stages[0]].micro_batch_size
        yield f"micro_batch_size {size}{others}", plan.with_replica(r, smaller)
    if any(stage.recompute != "full" or stage.recompute_num_layers is not None for stage in held.values()):
        none = [None] * len(held)
        full = with_each(recompute=["full"] * len(held), recompute_num_layers=none, wgrad_delay=none)
        yield "recompute full", full


def _is_legal(plan: Plan) -> bool:
    try:
        validate(plan)
    except PlanError:
        return False
    return True


def _smaller_depths(depths: list[int]) -> list[tuple[int, ...]]:
    """List ever smaller depths of one device's stages, the smallest first: each has one microbatch less in all than the
    next, the last one less than ``depths``."""
    found: list[tuple[int, ...]] = []
    while max(depths) > 1:
        deepest = depths.index(max(depths))
        depths = [depth - (i == deepest) for i, depth in enumerate(depths)]
        found.append(tuple(depths))
    return found[::-1]
