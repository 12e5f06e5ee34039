"""Builds the uniform plan that Megatron-LM's own flags describe: every replica alike, every stage alike."""

from hetero.errors import PlanError
from hetero.plan.ir import Plan, Precision, Recompute, Replica, Stage
from hetero.plan.validate import enough_in_flight
from hetero.schedule.orders import BY_DEPTHS
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
    stages_per_rank: int = 1,
    schedule: str = BY_DEPTHS,
    precision: Precision = "fp32",
    recompute: Recompute = "none",
    recompute_num_layers: int | None = None,
    distributed_optimizer: bool = False,
) -> Plan:
    """Builds a plan of ``world_size / (tp * pp)`` equal replicas of ``pp * stages_per_rank`` equal stages.

    Ranks are laid out as Megatron-LM does: tensor parallelism varies fastest, then data, then pipeline. 1F1B keeps
    ``pp - s`` microbatches in flight at stage s (arXiv 2104.04473); other schedules keep all of them. With v stages per
    rank, stage s sits on the ranks of pipeline position s mod pp, and position p keeps 2 (pp - p - 1) + (v - 1) pp + 1
    microbatches of any of its stages (section 2.2 there), and more where the last round, of fewer than pp of them,
    would deadlock.
    ``recompute_num_layers`` is of each stage, and all of its layers where it has fewer.

    Raises:
        PlanError: a number is below 1, or a degree does not divide what it has to.
    """
    flags = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--num-virtual-stages-per-pipeline-rank": stages_per_rank,
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
    num_stages = pp * stages_per_rank
    if model.num_layers % num_stages:
        per_rank = f" x {stages_per_rank} stages per rank" if stages_per_rank > 1 else ""
        raise PlanError(
            f"uniform plan: --pipeline-model-parallel-size {pp}{per_rank} does not divide --num-layers "
            f"{model.num_layers}; give an uneven plan with --hetero-plan"
        )
    if stages_per_rank > 1 and pp == 1:
        raise PlanError(
            f"uniform plan: {stages_per_rank} stages per rank need --pipeline-model-parallel-size 2 or more, got 1"
        )
    if global_batch_size % (dp * micro_batch_size):
        raise PlanError(
            f"uniform plan: --global-batch-size {global_batch_size} is no multiple of --micro-batch-size "
            f"{micro_batch_size} x {dp} data-parallel replicas"
        )
    num_samples = global_batch_size // dp
    num_microbatches = num_samples // micro_batch_size
    layers = model.num_layers // num_stages
    depths = _depths(pp, stages_per_rank, num_microbatches, warms_up=schedule == BY_DEPTHS)

    def stage(d: int, s: int) -> Stage:
        first_rank = (s % pp * dp + d) * tp
        return Stage(
            first_layer=s * layers,
            end_layer=(s + 1) * layers,
            ranks=tuple(range(first_rank, first_rank + tp)),
            device=device,
            tp=tp,
            sequence_parallel=sequence_parallel,
            micro_batch_size=micro_batch_size,
            in_flight=depths[s],
            recompute=recompute,
            recompute_num_layers=min(recompute_num_layers, layers) if recompute_num_layers is not None else None,
        )

    first = Replica(num_samples=num_samples, stages=tuple(stage(0, s) for s in range(num_stages)), schedule=schedule)
    if first.is_interleaved:
        # Where the last round is not full, the warm-up may be too short. Megatron-LM refuses such batches.
        depths = enough_in_flight(first) or depths
    stages = (tuple(stage(d, s) for s in range(num_stages)) for d in range(dp))
    replicas = tuple(first.with_stages(each) for each in stages)
    return Plan(
        model=model,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        precision=precision,
        distributed_optimizer=distributed_optimizer,
        replicas=replicas,
    )


def _depths(pp: int, stages_per_rank: int, num_microbatches: int, *, warms_up: bool) -> list[int]:
    """``in_flight`` of every stage: all microbatches, or with ``warms_up`` those of the stage in 1F1B's warm-up."""
    if not warms_up:
        return [num_microbatches] * (pp * stages_per_rank)
    if stages_per_rank == 1:
        return [min(pp - s, num_microbatches) for s in range(pp)]
    depths = [0] * (pp * stages_per_rank)
    for position in range(pp):
        warm_up = min(2 * (pp - position - 1) + (stages_per_rank - 1) * pp + 1, num_microbatches * stages_per_rank)
        rounds = [
            position + v * pp
            for first in range(0, num_microbatches, pp)
            for v in range(stages_per_rank)
            for _ in range(first, min(first + pp, num_microbatches))
        ]
        for s in rounds[:warm_up]:
            depths[s] += 1
    return [max(1, depth) for depth in depths]
