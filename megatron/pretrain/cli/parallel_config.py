"""Declares the flags of parallelism: the plan's source, the uniform plan, communication, the emulated cluster."""

from operator import itemgetter
from pathlib import Path
from typing import Literal, get_args

from hetero.cost.runtime_model import HETERO
from hetero.emulation.options import EmulationOptions
from hetero.plan.batch_sizes import VaryingBatch
from hetero.plan.ir import Precision, Recompute
from hetero.planner.problem import Offloading, Problem
from hetero.schedule.orders import BY_DEPTHS, ORDERS
from megatron.pretrain.cli import derived
from megatron.pretrain.cli.fields import (
    Condition,
    Flag,
    FlagValues,
    Relations,
    computed,
    config_dataclass,
    equals,
    flag,
    given,
    part,
    switch,
)
from megatron.pretrain.cli.value_types import (
    BATCH_SCHEDULE,
    COUNT,
    COUNT_FROM_0,
    FRACTION_FROM_0,
    HEARTBEAT_SECONDS,
    PATH,
    SECONDS,
    TIME_SCALE,
    TIMEOUT_MINUTES,
    one_of,
    only,
)

PLAN, PRECISION = "parallelism: plan", "precision"
"""Groups of ``--help`` beside that of the config."""


def _has_prices(flags: FlagValues) -> bool:
    """Whether anybody asks what devices take: a planner, an emulation, or who measures stages and compares."""
    measures = flags["--hetero-stage-times-interval"] is not None
    return derived.plans_at_start(flags) or derived.emulates(flags) or measures


def _may_share_optimizer(flags: FlagValues) -> bool:
    """Whether optimizer state is shared, or a plan file may say so."""
    return bool(flags["--use-distributed-optimizer"]) or derived.has_plan_file(flags)


def _has_nccl(flags: FlagValues) -> bool:
    """Whether ranks have GPUs."""
    return derived.backend(flags) == "nccl"


_OF_PRICES = Relations(
    needs=(
        Condition(_has_prices, "--hetero-emulate, --hetero-cluster and no plan file, or --hetero-stage-times-interval"),
    ),
)
_OF_PLANNING = Relations(needs=(Condition(derived.plans_at_start, "a cluster and no plan file"),))
_OF_EMULATION = Relations(needs=(given("--hetero-emulate"),))
_STATED_BY_PLAN = Relations(stated_by_plan=True)


@config_dataclass
class PlannerConfig:
    """Tells rank 0 what to plan from at start.

    profiles: files beside the shipped ones.
    data_sheets: price devices without any profile by their data sheets.
    offload: ``auto`` leaves optimizer state to hosts that the cluster file describes, where memory is short and the
        optimizer is distributed.
    host_memory_gib: of every host, in place of what the file says.
    out: where the plan is written, if anywhere.
    """

    cluster: Path = computed(derived.planned_cluster)
    profiles: tuple[Path, ...] = flag(
        "With a cluster: profiles beside the shipped ones.", name="--hetero-profile", default=(), relations=_OF_PRICES
    )
    data_sheets: bool = flag(
        "With a cluster: price devices without any profile by their data sheets.",
        name="--hetero-data-sheets",
        default=False,
        relations=_OF_PRICES,
    )
    time_limit_s: float = flag(
        "With a cluster: seconds to plan.",
        SECONDS,
        name="--hetero-plan-time-limit",
        default=Problem.time_limit_s,
        relations=_OF_PLANNING,
    )
    offload: Offloading = flag(
        "With a cluster and --use-distributed-optimizer: auto leaves optimizer state to hosts where memory is short.",
        one_of(*get_args(Offloading)),
        name="--hetero-offload",
        default="auto",
        relations=_OF_PLANNING,
    )
    host_memory_gib: int | None = flag(
        "With a cluster: GiB of every host that plans may leave state in, at most what it has.",
        COUNT,
        name="--hetero-host-memory-gib",
        default=None,
        relations=_OF_PLANNING,
    )
    out: Path | None = flag(
        "With a cluster: write the plan that was made here.",
        name="--hetero-plan-out",
        default=None,
        relations=_OF_PLANNING,
    )


@config_dataclass
class ParallelConfig:
    """Names a plan file, or a cluster to plan for at start, or the degrees of the uniform plan.

    With a plan of the first two kinds, it states degrees, schedule, microbatches and recompute: the fields here then
    hold defaults and ``micro_batch_size`` is ``None``.

    hetero_cluster: any plan is checked against it; ``planner`` is set if the plan is made for it.
    schedule: a name in :data:`hetero.schedule.orders.ORDERS`.
    context_parallel_size, expert_model_parallel_size: of Megatron-LM's scripts, with one legal value.
    precision: as the flags say; ``None`` is the plan file's, or fp32.
    use_distributed_optimizer: as the flags say; false is the plan file's, or none.
    timeout_minutes: longest wait of ranks for one another, for their arrival, and for a save that writes nothing.
    heartbeat_timeout_s: a rank that has been silent for so long is lost.
    shares_devices: ranks of a host beyond its devices share them.
    """

    hetero_plan: Path | None = computed(
        derived.plan_file,
        Flag(
            "--hetero-plan",
            "Plan file (JSON): replicas, stages, ranks and microbatches, none like the other. "
            "'auto' plans at start, for --hetero-cluster or --hetero-emulate.",
            PATH,
            group=PLAN,
        ),
    )
    hetero_cluster: Path | None = computed(
        derived.cluster_file,
        Flag(
            "--hetero-cluster",
            "Cluster file (YAML). Without a plan file, rank 0 plans for it at start; with one, the plan is checked "
            "against it.",
            PATH,
            group=PLAN,
            relations=Relations(excludes=("--hetero-emulate",)),
        ),
    )
    planner: PlannerConfig | None = part(PLAN, when=derived.plans_at_start)
    schedule: str = flag(
        "Without a plan: few microbatches in flight, or all of a step.",
        one_of(*ORDERS),
        name="--hetero-schedule",
        default=BY_DEPTHS,
        relations=_STATED_BY_PLAN,
    )
    tensor_model_parallel_size: int = flag(
        "Without a plan: ranks that share each layer.", COUNT, default=1, relations=_STATED_BY_PLAN
    )
    pipeline_model_parallel_size: int = flag(
        "Without a plan: groups of ranks that share the layers.", COUNT, default=1, relations=_STATED_BY_PLAN
    )
    stages_per_rank: int = computed(
        derived.stages_per_rank,
        Flag(
            "--num-virtual-stages-per-pipeline-rank",
            "Without a plan: stages of each such group, which runs them in turns (interleaved 1F1B).",
            COUNT,
            default=1,
            relations=Relations(stated_by_plan=True, excludes=("--num-layers-per-virtual-pipeline-stage",)),
        ),
        Flag(
            "--num-layers-per-virtual-pipeline-stage",
            "The same by the layers of a stage, in place of --num-virtual-stages-per-pipeline-rank.",
            COUNT,
            relations=_STATED_BY_PLAN,
        ),
    )
    sequence_parallel: bool = flag(
        "Without a plan: tensor-parallel ranks also share activations, by sequence.",
        default=False,
        relations=_STATED_BY_PLAN,
    )
    micro_batch_size: int | None = flag(
        "Without a plan, and then required: samples of one microbatch.", COUNT, default=None, relations=_STATED_BY_PLAN
    )
    global_batch_size: int = computed(
        derived.global_batch_size,
        Flag(
            "--global-batch-size",
            "Samples of one step over all replicas. This or --step-batch-size-schedule is required.",
            COUNT,
            relations=Relations(excludes=("--step-batch-size-schedule",)),
        ),
    )
    varying_batch: VaryingBatch | None = computed(
        derived.varying_batch,
        Flag(
            "--rampup-batch-size",
            "Three numbers, with --train-samples: samples of the first steps, by how many a step grows at a time, and "
            "over how many samples of the run it grows evenly, up to --global-batch-size.",
            COUNT,
            many=True,
            relations=Relations(excludes=("--hetero-emulate",)),
        ),
        Flag(
            "--step-batch-size-schedule",
            "Pairs TOKENS:SAMPLES, with --train-samples and in place of --global-batch-size: steps take SAMPLES once "
            "the run has consumed TOKENS, such as 250B (K, M, B, T). Plans are made for the largest.",
            BATCH_SCHEDULE,
            relations=Relations(excludes=("--rampup-batch-size", "--hetero-emulate")),
        ),
    )
    recompute: Recompute = flag(
        "Without a plan: do not keep the inside of attention, or of whole layers, for the backward.",
        one_of("selective", "full"),
        name="--recompute-granularity",
        default="none",
        relations=_STATED_BY_PLAN,
    )
    recompute_num_layers: int | None = computed(
        derived.recompute_num_layers,
        Flag(
            "--recompute-num-layers",
            "With --recompute-granularity full: layers of each stage; without it all.",
            COUNT,
            relations=Relations(stated_by_plan=True, needs=(equals("--recompute-granularity", "full"),)),
        ),
        Flag(
            "--recompute-method",
            "Layers that --recompute-num-layers recomputes: block for the first of each stage, uniform for all, "
            "whatever the number.",
            one_of("block", "uniform"),
            default="block",
        ),
    )
    context_parallel_size: int = flag(
        "Accepted for Megatron-LM's scripts.",
        only(1, "context parallelism is not there yet; share long sequences with --sequence-parallel"),
        default=1,
    )
    expert_model_parallel_size: int = flag(
        "Accepted for Megatron-LM's scripts.",
        only(1, "expert parallelism is not there yet; share experts with --tensor-model-parallel-size"),
        default=1,
    )
    overlap_grad_reduce: bool = flag(
        "Sum gradients over replicas while the backward goes on. On unless --no-overlap-grad-reduce is given.",
        default=True,
        off="--no-overlap-grad-reduce",
    )
    use_distributed_optimizer: bool = flag(
        "Share optimizer state among ranks that hold the same weights (ZeRO-1).", default=False
    )
    optimizer_cpu_offload: bool = flag(
        "Without a plan, with --use-distributed-optimizer: leave optimizer state to the hosts, which update during the "
        "next forward.",
        default=False,
        relations=Relations(stated_by_plan=True, needs=(given("--use-distributed-optimizer"),)),
    )
    optimizer_offload_fraction: float = flag(
        "With that: the share of each stage's parameters, from its end and by whole layers.",
        FRACTION_FROM_0,
        default=1.0,
        relations=Relations(
            stated_by_plan=True,
            needs=(given("--optimizer-cpu-offload"),),
            idle=lambda flags: flags["--optimizer-offload-fraction"] == 0,
        ),
    )
    cpu_offloading_num_layers: int = flag(
        "Without a plan, in one pipeline stage that computes nothing again: what the first N layers save for the "
        "backward waits on the host. All but one at most.",
        COUNT_FROM_0,
        default=0,
        relations=Relations(stated_by_plan=True, excludes=("--recompute-granularity",)),
    )
    overlap_param_gather: bool = flag(
        "With that: gather updated weights while the next forward goes on.",
        default=False,
        relations=Relations(needs=(Condition(_may_share_optimizer, "--use-distributed-optimizer"),)),
    )
    bucket_size: int = flag(
        "Gradients, in numbers, summed at a time, unless the plan says.",
        COUNT,
        name="--ddp-bucket-size",
        default=HETERO.bucket_numel,
    )
    backend: Literal["gloo", "nccl"] = computed(
        derived.backend,
        Flag("--distributed-backend", "Who moves tensors; without it nccl if CUDA is there.", one_of("gloo", "nccl")),
    )
    shares_devices: bool = flag(
        "Let more ranks than GPUs of a host share them, in turns, to try a plan out; their times mean nothing. "
        "Needs NCCL 2.30 or newer.",
        name="--hetero-share-devices",
        default=False,
        relations=Relations(needs=(Condition(_has_nccl, "--distributed-backend nccl"),)),
    )
    timeout_minutes: float = flag(
        "Longest time that ranks wait for one another: for a rank to arrive, in a collective or transfer of any group, "
        "and for a save that writes nothing.",
        TIMEOUT_MINUTES,
        name="--distributed-timeout-minutes",
        default=10.0,
    )
    heartbeat_timeout_s: float = flag(
        "Take a rank for lost that has given no sign of life for so many seconds, and end all.",
        HEARTBEAT_SECONDS,
        name="--hetero-heartbeat-timeout",
        default=30.0,
    )
    precision: Precision | None = computed(
        derived.precision,
        switch(
            "--bf16",
            "Compute in bf16, with master weights, gradients and moments in fp32.",
            PRECISION,
            relations=Relations(excludes=("--fp16",)),
        ),
        switch("--fp16", "The same in fp16, with a scaled loss.", PRECISION),
    )


@config_dataclass
class EmulationConfig:
    """Names the cluster that is emulated, and what its devices are priced from."""

    cluster: Path = computed(
        itemgetter("--hetero-emulate"),
        Flag(
            "--hetero-emulate",
            "Instead of --hetero-cluster: behave in time and memory like that cluster, all ranks on this machine's "
            "CPU, while a small model computes.",
            PATH,
        ),
    )
    profiles: tuple[Path, ...] = computed(itemgetter("--hetero-profile"))
    data_sheets: bool = computed(itemgetter("--hetero-data-sheets"))
    options: EmulationOptions = part(
        fields={
            "time_scale": flag(
                "Wall seconds per emulated second; without it 1, or more where this machine is too slow for that.",
                TIME_SCALE,
                name="--hetero-emulate-time-scale",
                relations=_OF_EMULATION,
            ),
            "seq_length": flag(
                "Sequence length of the small model that computes.",
                COUNT,
                name="--hetero-emulate-seq-length",
                relations=_OF_EMULATION,
            ),
        }
    )
