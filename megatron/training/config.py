"""What the flags say, as frozen dataclasses: one per concern, handed to whoever is concerned and nobody else."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hetero.emulation.options import EmulationOptions
from hetero.plan.ir import Precision, Recompute
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.spec.model import RotaryScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model, except for its vocabulary, which may come from the tokenizer.

    vocab_size: ``None`` takes the tokenizer's.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int | None
    make_vocab_size_divisible_by: int
    max_position_embeddings: int
    position_embedding: Literal["learned_absolute", "rope"]
    rotary_base: float
    rotary_percent: float
    rotary_scaling: RotaryScaling | None
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float
    activation: Literal["gelu", "swiglu"]
    linear_bias: bool
    qkv_bias: bool
    proj_bias: bool
    qk_layernorm: bool
    tied_embeddings: bool
    num_experts: int | None
    moe_router_topk: int
    moe_ffn_hidden_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the tokens come from. ``data_path`` is prefixes, or weights and prefixes in turn, as Megatron has it.

    Exactly one of ``data_path``, ``train_data_path`` and ``mock_data`` is set.
    tokenizer_model: a ``tokenizer.json`` or its folder for ``HuggingFaceTokenizer``, else ``None``.
    """

    data_path: tuple[str, ...]
    train_data_path: tuple[str, ...]
    valid_data_path: tuple[str, ...]
    test_data_path: tuple[str, ...]
    split: str
    data_cache_path: Path | None
    mock_data: bool
    tokenizer_type: Literal["ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]
    tokenizer_model: str | None
    seq_length: int
    eod_mask_loss: bool
    num_workers: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedules. Counts are optimizer steps; ``clip_grad`` 0 switches clipping off.

    lr_decay_iters: ``None`` decays until the last step.
    lr_warmup_fraction: share of the steps until the decay ends, instead of ``lr_warmup_iters``.
    lr_wsd_decay_iters: set exactly when ``lr_decay_style`` is ``WSD``.
    start_weight_decay, end_weight_decay: both are ``weight_decay`` while ``weight_decay_incr_style`` is ``constant``.
    """

    lr: float
    min_lr: float
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_fraction: float | None
    lr_warmup_init: float
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"]
    lr_wsd_decay_iters: int | None
    weight_decay: float
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    clip_grad: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """What rank 0 plans from at start.

    profiles: files beside the shipped ones.
    data_sheets: price devices without any profile by their data sheets.
    out: where the plan is written, if anywhere.
    """

    cluster: Path
    profiles: tuple[Path, ...]
    data_sheets: bool
    time_limit_s: float
    out: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """A plan file, or a cluster to plan for at start, or the degrees of the uniform plan.

    With a plan of the first two kinds, it states degrees, schedule, microbatches and recompute: the fields here then
    hold defaults and ``micro_batch_size`` is ``None``.

    hetero_cluster: any plan is checked against it; ``planner`` is set if the plan is made for it.
    schedule: a name in :data:`hetero.schedule.orders.ORDERS`.
    precision: as the flags say; ``None`` is the plan file's, or fp32.
    use_distributed_optimizer: as the flags say; false is the plan file's, or none.
    timeout_minutes: for the ranks to arrive, and for a collective among ranks that all live.
    heartbeat_timeout_s: a rank that has been silent for so long is lost.
    """

    hetero_plan: Path | None
    hetero_cluster: Path | None
    planner: PlannerConfig | None
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    stages_per_rank: int
    sequence_parallel: bool
    schedule: str
    micro_batch_size: int | None
    global_batch_size: int
    precision: Precision | None
    recompute: Recompute
    recompute_num_layers: int | None
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    bucket_size: int
    backend: Literal["gloo", "nccl"]
    timeout_minutes: float
    heartbeat_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where state is saved and loaded. Without ``save`` nothing is; without ``load`` weights are drawn from the seed.

    save_interval: steps; ``None`` saves at the end alone.
    keep_last: checkpoints that stay; ``None`` keeps all.
    load_step: ``None`` is the newest.
    finetune: load weights alone, and begin at step 1 with fresh moments, schedule and data.
    """

    save: Path | None
    save_interval: int | None
    keep_last: int | None
    asynchronous: bool
    load: Path | None
    load_step: int | None
    finetune: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long to train, from which seed, what to tell, and when to evaluate.

    eval_iters: global batches of an evaluation, every ``eval_interval`` steps and at the end; 0 for none.
    exit_interval: leave at a step that is a multiple of it; ``exit_duration_minutes``: leave after that time.
    check_for_nan: end with an error at a loss or a gradient that is not finite, unless a loss scale adapts to it.
    """

    train_iters: int
    seed: int
    log_interval: int
    tensorboard_dir: Path | None
    progress: bool
    eval_interval: int
    eval_iters: int
    exit_interval: int | None
    exit_duration_minutes: float | None
    check_for_nan: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationConfig:
    """The cluster that is emulated, and what its devices are priced from."""

    cluster: Path
    profiles: tuple[Path, ...]
    data_sheets: bool
    options: EmulationOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """``emulation``: ``None`` where the devices are what they are."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    stage: StageOptions
    loss_scale: LossScaleOptions
    checkpoint: CheckpointConfig
    run: RunConfig
    emulation: EmulationConfig | None = None
