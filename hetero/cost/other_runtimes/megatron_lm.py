"""Megatron-LM as it is without this project, as the cost model sees it: its properties and its order of a step.

It runs 1F1B, plain or interleaved (its ``schedules.py``). Between two computes it sends and receives in one
``batch_isend_irecv``, and waits for all of it before it goes on. Where the versions of the published runs differ, there
are several models:

| model | attention | gradients of fp16 weights | their sums |
|---|---|---|---|
| :data:`MEGATRON_LM` | scores in memory | fp16 | one buffer, after the last backward (``--DDP-impl local``) |
| :data:`MEGATRON_LM_TORCH_DDP` | scores in memory | fp16 | buckets, beside the last backward (``--DDP-impl torch``) |
| :data:`MEGATRON_CORE` | flash | fp32 | one buffer, after the last backward |
"""

import dataclasses
from itertools import pairwise

from hetero.cost.other_runtimes.deepspeed import TRANSFER_HOST_S
from hetero.cost.runtime_model import HETERO
from hetero.errors import PlanError
from hetero.plan.ir import Replica
from hetero.plan.lowering import step_rows
from hetero.schedule.actions import COMPUTE, RECEIVE, SEND, ActionKind, Row, Schedule
from hetero.schedule.orders import BY_DEPTHS
from hetero.spec.profile import LayerImplementation
from hetero.units import BYTES_OF_PRECISION, MIB

NAME = "megatron-lm"


def megatron_rows(replica: Replica) -> Schedule:
    """The computes and transfers of ``replica`` in the order of Megatron-LM, one row per device group.

    What lies between two computes is one batch. Interleaved, a forward and the backward behind it have one exchange
    together, after the backward; with one round of microbatches all forwards come first.

    Raises:
        PlanError: stages count different microbatches, split their backward, or have another order or other depths than
            its 1F1B, which it cannot do.
    """
    counts = replica.microbatch_counts
    if len(set(counts)) > 1:
        raise PlanError(f"{NAME}: stages count {list(counts)} microbatches, this runtime needs equal counts")
    if any(stage.wgrad_delay is not None for stage in replica.stages):
        raise PlanError(f"{NAME}: this runtime does not split backwards; set wgrad_delay to null")
    if replica.schedule != BY_DEPTHS:
        raise PlanError(f"{NAME}: this runtime has no schedule {replica.schedule!r}; set it to {BY_DEPTHS}")
    if replica.is_interleaved and counts[0] == len(replica.device_groups):
        return step_rows(replica.with_each_stage(in_flight=counts), receives_ahead=0)
    depths = [sum(replica.stages[s].in_flight for s in group) for group in replica.device_groups]
    if depths != (kept := _depths(replica)):
        raise PlanError(f"{NAME}: in_flight {depths}, this runtime keeps {kept} microbatches on its device groups")
    rows = step_rows(replica, receives_ahead=0)
    return [_exchanging_in_pairs(row) for row in rows] if replica.is_interleaved else rows


def _depths(replica: Replica) -> list[int]:
    """Microbatches in flight on every device group, of all its stages: those of the warm-up and one more."""
    pp, v = len(replica.device_groups), len(replica.device_groups[0])
    per_position, more = (2, (v - 1) * pp) if v > 1 else (1, 0)
    return [min(per_position * (pp - p - 1) + more + 1, v * replica.num_microbatches(0)) for p in range(pp)]


def _exchanging_in_pairs(row: Row) -> Row:
    """``row`` with what a forward and the backward behind it exchange moved before and behind the two."""
    computes: Row = []
    gaps: list[Row] = [[]]
    for action in row:
        if action.kind in COMPUTE:
            computes.append(action)
            gaps.append([])
        else:
            gaps[-1].append(action)
    for i, (first, second) in enumerate(pairwise(computes)):
        if first.kind == ActionKind.F and second.kind == ActionKind.B:
            between, gaps[i + 1] = gaps[i + 1], []
            gaps[i] += [each for each in between if each.kind in RECEIVE]
            gaps[i + 2] = [each for each in between if each.kind in SEND] + gaps[i + 2]
    out = list(gaps[0])
    for compute, gap in zip(computes, gaps[1:], strict=True):
        out += [compute, *gap]
    return out


CONTEXT_GIB = (("GH200", 2.7),)
"""Measured: nvidia-smi's figure less the allocator's, 3.1 GiB on average over Sailor's 32 stages of Megatron-LM, is
this and the communicators."""

WHOLE_BUFFER = 2**62
"""Gradients of one buffer, however many, are summed by one collective."""

TORCH_BUCKET_NUMEL = 25 * MIB // BYTES_OF_PRECISION["fp16"]
"""25 MiB, the default ``bucket_cap_mb`` of torch's ``DistributedDataParallel``."""

MEGATRON_LM = dataclasses.replace(
    HETERO,
    name=NAME,
    rows=megatron_rows,
    blocking_transfers=True,
    batches_transfers=True,
    partitions_transfers=True,
    transfer_host_s=TRANSFER_HOST_S,
    overlaps_gradient_sync=False,
    bucket_numel=WHOLE_BUFFER,
    half_gradients=True,
    implementation=LayerImplementation(attention="fused-softmax", dropout=True),
    loss_copies=1,
    holds_collective_tensors=True,
    loads_all_kernels_for_experts=False,
    context_gib=CONTEXT_GIB,
)
"""Megatron-LM of 2021 and 2022 with its own data parallelism: the norm is agreed on by all before the update."""

MEGATRON_LM_TORCH_DDP = dataclasses.replace(MEGATRON_LM, overlaps_gradient_sync=True, bucket_numel=TORCH_BUCKET_NUMEL)
"""The same with torch's data parallelism, which it has for plans without pipelines."""

MEGATRON_CORE_LAYERS = LayerImplementation(attention="flash", dropout=True, overlaps_collectives=True)

MEGATRON_CORE = dataclasses.replace(
    MEGATRON_LM, half_gradients=False, partitions_transfers=False, implementation=MEGATRON_CORE_LAYERS
)
"""megatron-core 0.6 with TransformerEngine and its defaults: sums and gathers overlap with nothing."""
