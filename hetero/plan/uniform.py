"""The uniform plan that Megatron-LM's own flags describe: every replica alike, every stage alike."""

from hetero.errors import PlanError
from hetero.plan.ir import Plan, Precision, Recompute, Replica, Stage
from hetero.spec.model import ModelSpec


def uniform_plan(
    *,
    model: ModelSpec,
    world_size: int,
    tp: int = 1,
    pp: int = 1,
    micro_batch_size: int,
    global_batch_size: int,
    seq_length: int,
    device: str,
    sequence_parallel: bool = False,
    gpipe: bool = False,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    distributed_optimizer: bool = False,
) -> Plan:
    """``world_size / (tp * pp)`` equal replicas of ``pp`` equal stages.

    Ranks are laid out as Megatron-LM does: tensor parallelism varies fastest, then data, then pipeline. 1F1B keeps
    ``pp - s`` microbatches in flight at stage s (arXiv 2104.04473); ``gpipe`` keeps all of them.
    ``recompute_num_layers`` is of each stage, and all of its layers where it has fewer.

    Raises:
        PlanError: a number is below 1, or a degree does not divide what it has to.
    """
    flags = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--micro-batch-size": micro_batch_size,
        "--global-batch-size": global_batch_size,
    }
    for flag, value in flags.items():
        if value < 1:
            raise PlanError(f"uniform plan: {flag} is {value}, must be at least 1")
    if world_size % (tp * pp):
        raise PlanError(
            f"uniform plan: {world_size} ranks are no multiple of --tensor-model-parallel-size {tp} "
            f"x --pipeline-model-parallel-size {pp}"
        )
    dp = world_size // (tp * pp)
    if model.num_layers % pp:
        raise PlanError(
            f"uniform plan: --pipeline-model-parallel-size {pp} does not divide --num-layers {model.num_layers}; "
            "give an uneven plan with --hetero-plan"
        )
    if global_batch_size % (dp * micro_batch_size):
        raise PlanError(
            f"uniform plan: --global-batch-size {global_batch_size} is no multiple of --micro-batch-size "
            f"{micro_batch_size} x {dp} data-parallel replicas"
        )
    num_samples = global_batch_size // dp
    num_microbatches = num_samples // micro_batch_size
    layers = model.num_layers // pp

    def stage(d: int, s: int) -> Stage:
        first_rank = (s * dp + d) * tp
        return Stage(
            first_layer=s * layers,
            end_layer=(s + 1) * layers,
            ranks=tuple(range(first_rank, first_rank + tp)),
            device=device,
            tp=tp,
            sequence_parallel=sequence_parallel,
            micro_batch_size=micro_batch_size,
            in_flight=num_microbatches if gpipe else min(pp - s, num_microbatches),
            recompute=recompute,
            recompute_num_layers=min(recompute_num_layers, layers) if recompute_num_layers is not None else None,
        )

    replicas = tuple(Replica(num_samples=num_samples, stages=tuple(stage(d, s) for s in range(pp))) for d in range(dp))
    return Plan(
        model=model,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        precision=precision,
        distributed_optimizer=distributed_optimizer,
        replicas=replicas,
    )
