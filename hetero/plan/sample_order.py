"""Computes which samples each rank trains on, so that every plan sees the same data at the same step.

The dataset has one order. A step takes the ``global_batch_size`` samples behind those of the steps before; a replica
takes a contiguous block of them, a stage cuts that block into its own microbatches, and each data-parallel rank takes
a contiguous part of every microbatch. Stages of one replica may cut differently and still meet the same samples.
"""

from hetero.plan.ir import Placement, Plan


def microbatch_indices(plan: Plan, placement: Placement, *, first_sample: int) -> tuple[tuple[int, ...], ...]:
    """The dataset indices of every microbatch of one rank in the step that begins with sample ``first_sample``.

    The plan has passed :func:`hetero.plan.validate.validate`, so that microbatches divide the replica's block. Ranks
    that differ in ``tp_rank`` only get the same samples, and so does a rank in each of the stages that it holds.

    Returns:
        One tuple per microbatch of the rank's stage, each of ``micro_batch_size`` consecutive indices.
    """
    replica = plan.replicas[placement.replica]
    stage = replica.stages[placement.stage]
    block = first_sample + plan.first_sample(placement.replica)
    own = block + placement.dp_rank * stage.micro_batch_size
    starts = (own + m * stage.samples_per_microbatch for m in range(replica.num_microbatches(placement.stage)))
    return tuple(tuple(range(start, start + stage.micro_batch_size)) for start in starts)
