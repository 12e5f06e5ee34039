"""Peak bytes of a device: what its stages hold together at its worst moment.

A stage holds up to ``in_flight`` microbatches of what its layers save between forward and backward; a stage that splits
its backward (arXiv 2401.10241) with delay k also holds what k microbatches wait with, and one more from the end of its
I to its W (:mod:`.stage_memory`).

A device with several stages holds the weights, gradients and optimizer states of all, and at its worst moment what its
row (:func:`~.activation_residency.worst_moments`) then holds of each. Of 1F1B with one stage per device that moment
follows from depth and delay.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from hetero.cost.cost_model import CostModel
from hetero.cost.gradient_volume import owned_parameters, parameters_held_twice
from hetero.cost.runtime_model import HETERO
from hetero.cost.stage_memory import MemoryBreakdown, StageMemory, memory_of_stage, optimizer_bytes_per_parameter
from hetero.plan.communicators import gradient_communicators
from hetero.plan.ir import Plan, Replica, StageKey
from hetero.plan.lowering import step_rows
from hetero.schedule.activation_residency import Moment, worst_moments
from hetero.schedule.orders import BY_DEPTHS
from hetero.spec.profile import ProfileStore

PlanMemory = Mapping[StageKey, MemoryBreakdown]
"""Bytes of one device of every stage at the device's peak."""


def memory_costs(plan: Plan) -> CostModel:
    """Enough to price the memory of ``plan``: what our own runtime holds needs no profile."""
    return CostModel(
        model=plan.model,
        seq_length=plan.seq_length,
        precision=plan.precision,
        profiles=ProfileStore([], device_types=plan.device_types),
        runtime=HETERO.with_dropout_of(plan),
    )


def plan_memory(plan: Plan, costs: CostModel) -> dict[StageKey, MemoryBreakdown]:
    """Bytes of one device of every stage of ``plan`` at the device's peak, by replica and stage.

    All devices of a stage are alike. A device with several stages has an entry for each: what it holds of that stage
    when it holds most in all. Their sum is the device's peak (:func:`device_memory`). What it has once for all of them
    stands with the first stage: the context, the communicators that belong to no boundary, and what the most demanding
    layer of any works with.
    """
    gradient_groups = Counter(rank for ranks in gradient_communicators(plan) for rank in ranks)
    owned = owned_parameters(plan) if plan.distributed_optimizer else {}
    twice = {} if costs.runtime.runs_profiled_layers else parameters_held_twice(plan)
    worst_moments_of = _WorstMoments()
    found = {}
    for r, replica in enumerate(plan.replicas):
        moments = worst_moments_of(replica)
        for group in replica.device_groups:
            ranks = replica.stages[group[0]].ranks
            num_gradient_groups = max(gradient_groups[rank] for rank in ranks)
            memories = {
                s: memory_of_stage(
                    replica.stages[s],
                    costs,
                    num_neighbours=(s > 0) + (s + 1 < len(replica.stages)),
                    shares_gradients=num_gradient_groups > 0,
                    num_gradient_groups=num_gradient_groups,
                    begins_device=s == group[0],
                )
                for s in group
            }
            owns_most = (
                max(ranks, key=lambda rank: sum(each.on_device for each in owned[rank].values())) if owned else None
            )
            for s, peak in _peak(replica, _on_one_device(memories, costs), moments.get(group)).items():
                if (held_twice := twice.get((r, s))) is not None:
                    on_device = held_twice.numel - held_twice.on_host
                    kept_there = held_twice.numel - held_twice.kept
                    peak = dataclasses.replace(
                        peak,
                        weights=peak.weights + costs.element_bytes * kept_there,
                        gradients=peak.gradients + costs.gradient_bytes * on_device,
                    )
                if owns_most is not None:
                    optimizer = optimizer_bytes_per_parameter(costs) * owned[owns_most][s].on_device
                    peak = dataclasses.replace(peak, optimizer=int(optimizer))
                found[r, s] = peak
    return found


def device_memory(plan: Plan, memory: Mapping[StageKey, MemoryBreakdown]) -> dict[StageKey, MemoryBreakdown]:
    """Bytes of one device of every device group at its peak, from what :func:`plan_memory` says of every stage.

    Returns:
        By replica and the first of the group's stages.
    """
    return {
        (r, group[0]): memory[r, group[0]] if len(group) == 1 else MemoryBreakdown.sum_of(memory[r, s] for s in group)
        for r, replica in enumerate(plan.replicas)
        for group in replica.device_groups
    }


class _WorstMoments:
    """Worst moments of device groups; of replicas with the same rows they are found once."""

    def __init__(self) -> None:
        self._known: dict[object, Mapping[tuple[int, ...], list[Moment]]] = {}

    def __call__(self, replica: Replica) -> Mapping[tuple[int, ...], list[Moment]]:
        """By device group, from its row; empty where depths and delays say what is held at most."""
        groups = replica.device_groups
        if replica.schedule == BY_DEPTHS and len(groups) == len(replica.stages):
            return {}
        orders = tuple((stage.in_flight, stage.wgrad_delay) for stage in replica.stages)
        key = replica.schedule, groups, replica.microbatch_counts, orders
        if key not in self._known:
            rows = zip(groups, step_rows(replica), strict=True)
            self._known[key] = {group: worst_moments(row) for group, row in rows}
        return self._known[key]


def _peak(
    replica: Replica, memories: Mapping[int, StageMemory], moments: Sequence[Moment] | None
) -> Mapping[int, MemoryBreakdown]:
    """Bytes by stage when the devices that hold these stages of ``replica`` hold most."""
    if moments is None:
        return {
            s: memory.peak(
                in_flight=replica.stages[s].in_flight,
                wgrad_delay=replica.stages[s].wgrad_delay,
                num_microbatches=replica.num_microbatches(s),
            )
            for s, memory in memories.items()
        }
    at_moments = [{s: memory.holding(moment[s]) for s, memory in memories.items()} for moment in moments]
    return max(at_moments, key=lambda by_stage: sum(bytes_of.total for bytes_of in by_stage.values()))


def _on_one_device(memories: Mapping[int, StageMemory], costs: CostModel) -> Mapping[int, StageMemory]:
    """Stages of one device: what they use in turns is counted once, with the first of them."""
    if len(memories) == 1:
        return memories
    fixed = [memory.fixed for memory in memories.values()]
    gradients = sum(each.gradients for each in fixed)
    sync = costs.runtime.sync_buffer_bytes(gradients, costs.gradient_bytes) if any(f.sync_buffers for f in fixed) else 0
    once = {
        "working": max(each.working for each in fixed),
        "held_by_collectives": max(each.held_by_collectives for each in fixed),
        "sync_buffers": sync,
    }
    in_turns = itertools.chain([once], itertools.repeat(dict.fromkeys(once, 0)))
    return {
        s: dataclasses.replace(memory, fixed=dataclasses.replace(memory.fixed, **shared))
        for (s, memory), shared in zip(memories.items(), in_turns, strict=False)
    }
