"""Builds the uniform plan that Megatron-LM's own flags describe: every replica alike, every stage alike."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from hetero.errors import PlanError
from hetero.plan.depths import enough_in_flight
from hetero.plan.ir import Plan, Precision, Recompute, Replica, Stage
from hetero.plan.offload import Offload
from hetero.schedule.orders import BY_DEPTHS
from hetero.spec.devices import DeviceType
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import stage_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformLayout:
    """What Megatron-LM's flags say of a plan, each number under the name of its flag.

    world_size: ranks in all, of the type ``device``.
    devices: descriptions of it, if it does not ship.
    stages_per_rank: of one replica; more than one are interleaved.
    recompute_num_layers: of each stage, and all of its layers where it has fewer.
    fp8: all stages multiply in fp8.
    optimizer_offload_fraction: each stage leaves at least this share of its parameters' optimizer state to its host,
        whole layers from its end; 0 is none.
    activation_offload_num_layers: what the embedding and so many first layers save for the backward waits on the host,
        in a model of one stage that computes nothing again, as Megatron-LM's ``--cpu-offloading-num-layers`` asks for;
        0 is none.
    """

    model: ModelSpec
    world_size: int
    tp: int = 1
    pp: int = 1
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    device: str
    sequence_parallel: bool = False
    stages_per_rank: int = 1
    schedule: str = BY_DEPTHS
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    fp8: bool = False
    distributed_optimizer: bool = False
    optimizer_offload_fraction: float = 0.0
    activation_offload_num_layers: int = 0
    hidden_dropout: float | None = None
    attention_dropout: float | None = None
    devices: tuple[DeviceType, ...] = ()

    @property
    def dp(self) -> int:
        """Replicas, which is what Megatron-LM calls data parallelism."""
        return self.world_size // (self.tp * self.pp)

    @property
    def num_stages(self) -> int:
        """Counts the stages of a replica."""
        return self.pp * self.stages_per_rank


def uniform_plan(layout: UniformLayout) -> Plan:
    """Builds a plan of ``world_size / (tp * pp)`` equal replicas of ``pp * stages_per_rank`` equal stages.

    Ranks are laid out as Megatron-LM does: tensor parallelism varies fastest, then data, then pipeline. 1F1B keeps
    ``pp - s`` microbatches in flight at stage s (arXiv 2104.04473); other schedules keep all of them. With v stages per
    rank, stage s sits on the ranks of pipeline position s mod pp, and position p keeps 2 (pp - p - 1) + (v - 1) pp + 1
    microbatches of any of its stages (section 2.2 there), and more where the last round, of fewer than pp of them,
    would deadlock.

    Raises:
        PlanError: a number is below 1, or a degree does not divide what it has to.
    """
    _check(layout)
    num_samples = layout.global_batch_size // layout.dp
    num_microbatches = num_samples // layout.micro_batch_size
    depths = _depths(layout.pp, layout.stages_per_rank, num_microbatches, warms_up=layout.schedule == BY_DEPTHS)
    stages = tuple(_stage(layout, replica=0, number=s, in_flight=depths[s]) for s in range(layout.num_stages))
    first = Replica(num_samples=num_samples, stages=stages, schedule=layout.schedule)
    if first.is_interleaved and num_microbatches % layout.pp:
        # Where the last round is not full, the warm-up may be too short. Megatron-LM refuses such batches.
        depths = enough_in_flight(first) or depths
    replicas = (
        tuple(_stage(layout, replica=d, number=s, in_flight=depths[s]) for s in range(layout.num_stages))
        for d in range(layout.dp)
    )
    return Plan(
        model=layout.model,
        seq_length=layout.seq_length,
        global_batch_size=layout.global_batch_size,
        precision=layout.precision,
        distributed_optimizer=layout.distributed_optimizer,
        hidden_dropout=layout.hidden_dropout,
        attention_dropout=layout.attention_dropout,
        devices=layout.devices,
        replicas=tuple(dataclasses.replace(first, stages=stages) for stages in replicas),
    )


def _check(layout: UniformLayout) -> None:
    """
    Raises:
        PlanError: a number is below 1, or a degree does not divide what it has to.
    """
    tp, pp, stages_per_rank, micro_batch_size = layout.tp, layout.pp, layout.stages_per_rank, layout.micro_batch_size
    flags = {
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--num-virtual-stages-per-pipeline-rank": stages_per_rank,
        "--micro-batch-size": micro_batch_size,
        "--global-batch-size": layout.global_batch_size,
    }
    for flag, value in flags.items():
        if value < 1:
            raise PlanError(f"uniform plan: {flag} is {value}, must be at least 1")
    if layout.world_size % (tp * pp):
        raise PlanError(
            f"uniform plan: {layout.world_size} ranks are no multiple of --tensor-model-parallel-size {tp} "
            f"x --pipeline-model-parallel-size {pp}"
        )
    if layout.model.num_layers % layout.num_stages:
        per_rank = f" x {stages_per_rank} stages per rank" if stages_per_rank > 1 else ""
        raise PlanError(
            f"uniform plan: --pipeline-model-parallel-size {pp}{per_rank} does not divide --num-layers "
            f"{layout.model.num_layers}; give an uneven plan with --hetero-plan"
        )
    if stages_per_rank > 1 and pp == 1:
        raise PlanError(
            f"uniform plan: {stages_per_rank} stages per rank need --pipeline-model-parallel-size 2 or more, got 1"
        )
    _check_activation_offload(layout)
    if layout.global_batch_size % (layout.dp * micro_batch_size):
        raise PlanError(
            f"uniform plan: --global-batch-size {layout.global_batch_size} is no multiple of --micro-batch-size "
            f"{micro_batch_size} x {layout.dp} data-parallel replicas"
        )


def _check_activation_offload(layout: UniformLayout) -> None:
    """
    Raises:
        PlanError: as megatron-core's ``TransformerConfig``, which offloads in one stage, no layer that is computed
            again, and not all of them.
    """
    if not (count := layout.activation_offload_num_layers):
        return
    given = f"uniform plan: --cpu-offloading-num-layers is {count}"
    if count >= layout.model.num_layers:
        raise PlanError(f"{given}, must be below --num-layers {layout.model.num_layers}")
    if layout.pp > 1:
        raise PlanError(
            f"{given}, which is of a whole model, and --pipeline-model-parallel-size is {layout.pp}; leave one of them "
            "out, or give a plan with --hetero-plan, whose stages say it by offload.activations_until"
        )
    if layout.recompute != "none":
        raise PlanError(
            f"{given}, and --recompute-granularity is {layout.recompute}, which keeps little to bring to a host; leave "
            "one of them out"
        )


def _stage(layout: UniformLayout, *, replica: int, number: int, in_flight: int) -> Stage:
    layers = layout.model.num_layers // layout.num_stages
    first_rank = (number % layout.pp * layout.dp + replica) * layout.tp
    recomputed = layout.recompute_num_layers
    return Stage(
        first_layer=number * layers,
        end_layer=(number + 1) * layers,
        ranks=tuple(range(first_rank, first_rank + layout.tp)),
        device=layout.device,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        micro_batch_size=layout.micro_batch_size,
        in_flight=in_flight,
        recompute=layout.recompute,
        recompute_num_layers=min(recomputed, layers) if recomputed is not None else None,
        fp8=layout.fp8,
        offload=_offload(layout, number * layers, (number + 1) * layers),
    )


def _offload(layout: UniformLayout, first_layer: int, end_layer: int) -> Offload:
    """What a stage leaves to its host: updates at its end, activations at its begin."""
    count = layout.activation_offload_num_layers
    return Offload(
        optimizer_from=_first_on_host(layout, first_layer, end_layer),
        activations_until=count - 1.0 if count else None,
    )


def _first_on_host(layout: UniformLayout, first_layer: int, end_layer: int) -> float | None:
    """Where the fewest layers at the end of a stage begin that have the share of its parameters which hosts update."""
    if not layout.optimizer_offload_fraction:
        return None
    numel: Counter[int] = Counter()
    for parameter in stage_parameters(layout.model, first_layer=first_layer, end_layer=end_layer):
        # The other copy of a tied embedding lies in the head.
        is_tied_copy = parameter.position < 0 < first_layer
        numel[end_layer if is_tied_copy else int(parameter.position)] += parameter.numel
    wanted, left = layout.optimizer_offload_fraction * numel.total(), 0
    for position in sorted(numel, reverse=True):
        left += numel[position]
        if left >= wanted:
            break
    return float(position)


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
