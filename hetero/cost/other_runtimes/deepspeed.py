"""DeepSpeed's pipeline engine without ZeRO, as the cost model sees it: its properties and its order of a step.

Most published step times were measured under it. Its transfers run on the compute stream and block both sides, which
:mod:`hetero.cost.simulation.blocking_replay` replays, and it sums all gradients once, after the last backward.
"""

import dataclasses

from hetero.cost.runtime_model import HETERO
from hetero.errors import PlanError
from hetero.plan.ir import Replica
from hetero.schedule.actions import Action, ActionKind, Row, Schedule

NAME = "deepspeed-1f1b"


def deepspeed_rows(replica: Replica) -> Schedule:
    """The computes and transfers of ``replica`` in the order of DeepSpeed's ``TrainSchedule``, one row per stage.

    Raises:
        PlanError: stages count different microbatches, split their backward or share ranks, which it cannot do.
    """
    counts = replica.microbatch_counts
    if len(set(counts)) > 1:
        raise PlanError(f"{NAME}: stages count {list(counts)} microbatches, this runtime needs equal counts")
    if any(stage.wgrad_delay is not None for stage in replica.stages):
        raise PlanError(f"{NAME}: this runtime does not split backwards; set wgrad_delay to null")
    if replica.is_interleaved:
        raise PlanError(f"{NAME}: this runtime does not interleave stages; give each stage ranks of its own")
    return deepspeed_1f1b(num_stages=len(replica.stages), num_microbatches=counts[0])


def deepspeed_1f1b(*, num_stages: int, num_microbatches: int) -> Schedule:
    """DeepSpeed's ``TrainSchedule`` (``deepspeed/runtime/pipe/schedule.py``): 1F1B in lock step, with communication.

    In every slot a stage first exchanges with one neighbour and then computes. A forward's output leaves only in the
    next slot of the same stage.
    """
    return [_row(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _row(stage: int, num_stages: int, num_microbatches: int) -> Row:
    row: Row = []
    previous = -1
    for slot in range(2 * (num_microbatches + num_stages - 1)):
        is_forward = slot % 2 == stage % 2
        # The last stage turns round at once; each stage before it one slot later.
        number = (slot - stage) // 2 if is_forward else (slot + stage + 1) // 2 - num_stages
        has_number, has_previous = 0 <= number < num_microbatches, 0 <= previous < num_microbatches
        if is_forward and stage > 0:
            row += [Action(stage, ActionKind.RECV_F, number)] * has_number
            row += [Action(stage, ActionKind.SEND_B, previous)] * has_previous
        if not is_forward and stage + 1 < num_stages:
            row += [Action(stage, ActionKind.SEND_F, previous)] * has_previous
            row += [Action(stage, ActionKind.RECV_B, number)] * has_number
        if has_number:
            row.append(Action(stage, ActionKind.F if is_forward else ActionKind.B, number))
        previous = number
    return row


ELEMENTS_PER_BUFFER = 500_000_000
"""Default of ``DeepSpeedEngine.buffered_allreduce_fallback`` in ``deepspeed/runtime/engine.py``."""

TRANSFER_HOST_S = 8e-4
"""DeepSpeed reads the description of a gathered part from the device (``PartitionedTensor.from_meta``), Megatron-LM
calls ``torch.cuda.synchronize`` after every exchange (``p2p_communication.py``). Calibrated on the pipelines of both on
GH200."""

DEEPSPEED = dataclasses.replace(
    HETERO,
    name=NAME,
    rows=deepspeed_rows,
    blocking_transfers=True,
    partitions_transfers=True,
    transfer_host_s=TRANSFER_HOST_S,
    overlaps_gradient_sync=False,
    waits_for_all_before_update=False,
    bucket_numel=ELEMENTS_PER_BUFFER,
    copies_gradients_to_sync=True,
    implementation=None,
    loads_all_kernels_for_experts=False,
    loss_copies=2,
)
"""Blocking transfers on the compute stream, layers as they were profiled, one sum of gradients at the end."""
