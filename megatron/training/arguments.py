"""The command line as a :class:`PretrainConfig`: what the flags mean together."""

from collections.abc import Sequence
from typing import Literal

from hetero.emulation.options import EmulationOptions
from hetero.errors import ConfigError
from hetero.plan.ir import Precision
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.spec.model import ModelSpec, RotaryScaling, padded_vocab_size
from megatron.training.config import (
    CheckpointConfig,
    DataConfig,
    EmulationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PlannerConfig,
    PretrainConfig,
    RunConfig,
)
from megatron.training.flag_rules import (
    check_flags_go_together,
    check_nothing_is_missing,
    cluster_of,
    emulates,
    has_experts,
    has_samples,
    is_auto,
    is_rope,
    is_wsd,
    plans_at_start,
)
from megatron.training.flags import FlagValues, read_flags


def parse_args(argv: Sequence[str]) -> PretrainConfig:
    """The configuration that a command line (without the program's name) describes.

    ``--help`` prints and exits.

    Raises:
        ConfigError: a flag is unknown, unsupported, missing, has no effect, contradicts another, or has a value out of
            range. The message names flag, value, limit and fix.
    """
    flags = read_flags(argv)
    check_nothing_is_missing(flags)
    check_flags_go_together(flags)
    train_iters = flags["--train-iters"] or _in_steps(flags, "--train-samples")
    return PretrainConfig(
        model=_model_config(flags),
        data=_data_config(flags),
        optimizer=_optimizer_config(flags, train_iters=train_iters),
        parallel=_parallel_config(flags),
        stage=_stage_options(flags),
        loss_scale=_loss_scale_options(flags),
        checkpoint=CheckpointConfig(
            save=flags["--save"],
            save_interval=flags["--save-interval"],
            keep_last=flags["--hetero-keep-last"],
            asynchronous=flags["--async-save"],
            load=flags["--load"],
            load_step=flags["--ckpt-step"],
            finetune=flags["--finetune"],
        ),
        run=RunConfig(
            train_iters=train_iters,
            seed=flags["--seed"],
            log_interval=flags["--log-interval"],
            tensorboard_dir=flags["--tensorboard-dir"],
            progress=not flags["--no-progress"],
            eval_interval=flags["--eval-interval"],
            eval_iters=flags["--eval-iters"],
            exit_interval=flags["--exit-interval"],
            exit_duration_minutes=flags["--exit-duration-in-mins"],
            check_for_nan=flags["--check-for-nan-in-loss-and-grad"],
        ),
        emulation=_emulation_config(flags) if emulates(flags) else None,
    )


def model_spec(config: ModelConfig, *, tokenizer_vocab_size: int) -> ModelSpec:
    """The model with its vocabulary: the configured size, else the tokenizer's, padded.

    Raises:
        ConfigError: the configured vocabulary is smaller than the tokenizer's.
    """
    vocab_size = tokenizer_vocab_size if config.vocab_size is None else config.vocab_size
    if vocab_size < tokenizer_vocab_size:
        raise ConfigError(
            f"--vocab-size {vocab_size} is below the {tokenizer_vocab_size} tokens of the tokenizer: "
            f"raise it to at least {tokenizer_vocab_size}, or leave it out"
        )
    return ModelSpec(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=config.ffn_hidden_size,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, divisible_by=config.make_vocab_size_divisible_by),
        max_position_embeddings=config.max_position_embeddings,
        position_embedding=config.position_embedding,
        rotary_base=config.rotary_base,
        rotary_percent=config.rotary_percent,
        rotary_scaling=config.rotary_scaling,
        normalization=config.normalization,
        norm_epsilon=config.norm_epsilon,
        activation=config.activation,
        linear_bias=config.linear_bias,
        qkv_bias=config.qkv_bias,
        proj_bias=config.proj_bias,
        qk_layernorm=config.qk_layernorm,
        tied_embeddings=config.tied_embeddings,
        num_experts=config.num_experts,
        moe_router_topk=config.moe_router_topk,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
    )


def default_backend() -> Literal["gloo", "nccl"]:
    """``nccl`` where CUDA is there, else ``gloo``."""
    # Flags are also read where torch takes seconds to load and is not needed: --help, errors, a stated backend.
    import torch  # noqa: PLC0415

    return "nccl" if torch.cuda.is_available() else "gloo"


def _model_config(flags: FlagValues) -> ModelConfig:
    _check_experts(flags)
    ffn_hidden_size = _ffn_hidden_size(flags)
    moe_ffn_hidden_size = (flags["--moe-ffn-hidden-size"] or ffn_hidden_size) if has_experts(flags) else None
    linear_bias = not flags["--disable-bias-linear"]
    return ModelConfig(
        num_layers=flags["--num-layers"],
        hidden_size=flags["--hidden-size"],
        num_attention_heads=flags["--num-attention-heads"],
        num_query_groups=_num_query_groups(flags),
        kv_channels=_kv_channels(flags),
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=flags["--vocab-size"],
        make_vocab_size_divisible_by=flags["--make-vocab-size-divisible-by"],
        max_position_embeddings=_max_position_embeddings(flags),
        position_embedding=_position_embedding(flags),
        rotary_base=flags["--rotary-base"],
        rotary_percent=flags["--rotary-percent"],
        rotary_scaling=_rotary_scaling(flags),
        normalization=flags["--normalization"],
        norm_epsilon=flags["--norm-epsilon"],
        activation="swiglu" if flags["--swiglu"] else "gelu",
        linear_bias=linear_bias,
        qkv_bias=linear_bias or flags["--add-qkv-bias"],
        proj_bias=flags["--hetero-add-proj-bias"],
        qk_layernorm=flags["--qk-layernorm"],
        tied_embeddings=not flags["--untie-embeddings-and-output-weights"],
        num_experts=flags["--num-experts"],
        moe_router_topk=flags["--moe-router-topk"],
        moe_ffn_hidden_size=moe_ffn_hidden_size,
    )


def _check_experts(flags: FlagValues) -> None:
    if not has_experts(flags):
        return
    if not flags["--disable-bias-linear"]:
        raise ConfigError(f"{flags.shown('--num-experts')}: the experts here have no biases, add --disable-bias-linear")
    if flags["--moe-router-topk"] > flags["--num-experts"]:
        raise ConfigError(
            f"{flags.shown('--moe-router-topk')} exceeds {flags.shown('--num-experts')}: "
            "a token visits each expert at most once"
        )


def _ffn_hidden_size(flags: FlagValues) -> int:
    """As given, else four times the hidden size; gated, Megatron-LM's two thirds of that, down to a multiple of 64."""
    given: int | None = flags["--ffn-hidden-size"]
    hidden: int = flags["--hidden-size"]
    if given is not None:
        return given
    if not flags["--swiglu"]:
        return 4 * hidden
    size = int((4 * hidden * 2 / 3) / 64) * 64
    if size == 0:
        raise ConfigError(
            f"{flags.shown('--hidden-size')} with --swiglu: two thirds of {4 * hidden}, rounded down to a multiple "
            "of 64, is 0; give --ffn-hidden-size"
        )
    return size


def _num_query_groups(flags: FlagValues) -> int:
    heads: int = flags["--num-attention-heads"]
    if not flags["--group-query-attention"]:
        return heads
    groups: int = flags["--num-query-groups"]
    if heads % groups:
        raise ConfigError(f"{flags.shown('--num-query-groups')} does not divide {flags.shown('--num-attention-heads')}")
    return groups


def _kv_channels(flags: FlagValues) -> int:
    hidden, heads = flags["--hidden-size"], flags["--num-attention-heads"]
    size: int | None = flags["--kv-channels"]
    if size is None:
        if hidden % heads:
            raise ConfigError(
                f"{flags.shown('--num-attention-heads')} does not divide {flags.shown('--hidden-size')}: "
                "change one, or give --kv-channels"
            )
        size = hidden // heads
    rotated = int(size * flags["--rotary-percent"])
    if is_rope(flags) and (rotated < 2 or rotated % 2):
        raise ConfigError(
            f"{flags.shown('--rotary-percent')} of heads of size {size} rotates {rotated} channels: "
            "channels rotate in pairs, so change --rotary-percent or --kv-channels"
        )
    return size


def _max_position_embeddings(flags: FlagValues) -> int:
    positions: int = flags["--max-position-embeddings"]
    if positions < flags["--seq-length"]:
        raise ConfigError(
            f"{flags.shown('--max-position-embeddings')} is below {flags.shown('--seq-length')}: raise it to that"
        )
    return positions


def _position_embedding(flags: FlagValues) -> Literal["learned_absolute", "rope"]:
    contradiction = flags["--position-embedding-type"] != "rope" and "--position-embedding-type" in flags.given
    if flags["--use-rotary-position-embeddings"] and contradiction:
        raise ConfigError(
            f"{flags.shown('--position-embedding-type')} and --use-rotary-position-embeddings exclude each other: "
            "leave one out"
        )
    return "rope" if is_rope(flags) else "learned_absolute"


def _rotary_scaling(flags: FlagValues) -> RotaryScaling | None:
    if flags["--rotary-seq-len-interpolation-factor"] is not None:
        return RotaryScaling(kind="linear", factor=flags["--rotary-seq-len-interpolation-factor"])
    if not flags["--use-rope-scaling"]:
        return None
    low, high = "--hetero-rope-low-freq-factor", "--hetero-rope-high-freq-factor"
    if flags[low] >= flags[high]:
        raise ConfigError(f"{flags.shown(low)} is not below {flags.shown(high)}: lower the first or raise the second")
    return RotaryScaling(
        kind="llama3",
        factor=flags["--rope-scaling-factor"],
        low_freq_factor=flags[low],
        high_freq_factor=flags[high],
        original_max_position_embeddings=flags["--hetero-rope-original-max-positions"],
    )


def _data_config(flags: FlagValues) -> DataConfig:
    _check_tokenizer(flags)
    return DataConfig(
        data_path=flags["--data-path"],
        train_data_path=flags["--train-data-path"],
        valid_data_path=flags["--valid-data-path"],
        test_data_path=flags["--test-data-path"],
        split=flags["--split"],
        data_cache_path=flags["--data-cache-path"],
        mock_data=flags["--mock-data"],
        tokenizer_type=flags["--tokenizer-type"],
        tokenizer_model=flags["--tokenizer-model"],
        seq_length=flags["--seq-length"],
        eod_mask_loss=flags["--eod-mask-loss"],
        num_workers=flags["--num-workers"],
        seed=flags["--seed"],
    )


def _check_tokenizer(flags: FlagValues) -> None:
    kind, model = flags["--tokenizer-type"], flags["--tokenizer-model"]
    if kind == "HuggingFaceTokenizer" and model is None:
        raise ConfigError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or the folder that has it"
        )
    if kind != "HuggingFaceTokenizer" and model is not None:
        raise ConfigError(f"--tokenizer-model {model} has no effect: --tokenizer-type {kind} reads no file")
    if kind == "NullTokenizer" and flags["--vocab-size"] is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size: it has no vocabulary of its own")


def _optimizer_config(flags: FlagValues, *, train_iters: int) -> OptimizerConfig:
    _check_learning_rates(flags)
    decay_iters = _steps(flags, "--lr-decay-iters", "--lr-decay-samples")
    warmup_iters = _steps(flags, "--lr-warmup-iters", "--lr-warmup-samples") or 0
    wsd_decay_iters = _steps(flags, "--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
    _check_phases(
        flags, decay_iters=decay_iters or train_iters, warmup_iters=warmup_iters, wsd_decay_iters=wsd_decay_iters
    )
    start_weight_decay, end_weight_decay = _weight_decay_range(flags)
    return OptimizerConfig(
        lr=flags["--lr"],
        min_lr=flags["--min-lr"],
        lr_decay_style=flags["--lr-decay-style"],
        lr_decay_iters=decay_iters,
        lr_warmup_iters=warmup_iters,
        lr_warmup_fraction=flags["--lr-warmup-fraction"],
        lr_warmup_init=flags["--lr-warmup-init"],
        lr_wsd_decay_style=flags["--lr-wsd-decay-style"],
        lr_wsd_decay_iters=wsd_decay_iters,
        weight_decay=flags["--weight-decay"],
        start_weight_decay=start_weight_decay,
        end_weight_decay=end_weight_decay,
        weight_decay_incr_style=flags["--weight-decay-incr-style"],
        adam_beta1=flags["--adam-beta1"],
        adam_beta2=flags["--adam-beta2"],
        adam_eps=flags["--adam-eps"],
        clip_grad=flags["--clip-grad"],
    )


def _check_learning_rates(flags: FlagValues) -> None:
    for name in ("--min-lr", "--lr-warmup-init"):
        if flags[name] > flags["--lr"]:
            raise ConfigError(f"{flags.shown(name)} is above {flags.shown('--lr')}: lower it, or raise --lr")


def _check_phases(flags: FlagValues, *, decay_iters: int, warmup_iters: int, wsd_decay_iters: int | None) -> None:
    """Warmup, then decay, and WSD's last steps between them and the end of the decay."""
    unit = "samples" if has_samples(flags) else "iters"
    if is_wsd(flags) and wsd_decay_iters is None:
        raise ConfigError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}: the length of its last phase")
    fraction: float | None = flags["--lr-warmup-fraction"]
    warmup = warmup_iters if fraction is None else int(fraction * decay_iters)
    if warmup >= decay_iters:
        raise ConfigError(
            f"the warmup of {warmup} steps does not end before the decay of the learning rate does, at step "
            f"{decay_iters}: lower --lr-warmup-{unit}, or raise --lr-decay-{unit}"
        )
    if wsd_decay_iters is not None and warmup + wsd_decay_iters > decay_iters:
        raise ConfigError(
            f"WSD's last {wsd_decay_iters} steps and a warmup of {warmup} do not fit into the {decay_iters} steps "
            f"until the decay ends: lower --lr-wsd-decay-{unit}, or raise --lr-decay-{unit}"
        )


def _weight_decay_range(flags: FlagValues) -> tuple[float, float]:
    if flags["--weight-decay-incr-style"] == "constant":
        return flags["--weight-decay"], flags["--weight-decay"]
    start, end = flags["--start-weight-decay"], flags["--end-weight-decay"]
    if start is None or end is None:
        raise ConfigError(
            f"{flags.shown('--weight-decay-incr-style')} needs both --start-weight-decay and --end-weight-decay"
        )
    if end < start:
        raise ConfigError(
            f"{flags.shown('--end-weight-decay')} is below {flags.shown('--start-weight-decay')}: "
            "weight decay may grow over a run, not shrink"
        )
    return start, end


def _steps(flags: FlagValues, iters: str, samples: str) -> int | None:
    """The value of whichever of two flags was given, in steps."""
    if samples in flags.given:
        return _in_steps(flags, samples)
    steps: int | None = flags[iters]
    return steps


def _in_steps(flags: FlagValues, samples: str) -> int:
    batch: int = flags["--global-batch-size"]
    steps, rest = divmod(flags[samples], batch)
    if rest:
        raise ConfigError(
            f"{flags.shown(samples)} is no multiple of {flags.shown('--global-batch-size')}: "
            f"round it, for instance to {(steps + 1) * batch}"
        )
    return int(steps)


def _parallel_config(flags: FlagValues) -> ParallelConfig:
    micro, batch = flags["--micro-batch-size"], flags["--global-batch-size"]
    if micro is not None and batch % micro:
        raise ConfigError(
            f"{flags.shown('--global-batch-size')} is no multiple of {flags.shown('--micro-batch-size')}: change one"
        )
    return ParallelConfig(
        hetero_plan=None if is_auto(flags) else flags["--hetero-plan"],
        hetero_cluster=cluster_of(flags),
        planner=_planner_config(flags) if plans_at_start(flags) else None,
        tensor_model_parallel_size=flags["--tensor-model-parallel-size"],
        pipeline_model_parallel_size=flags["--pipeline-model-parallel-size"],
        stages_per_rank=_stages_per_rank(flags),
        sequence_parallel=flags["--sequence-parallel"],
        schedule=flags["--hetero-schedule"],
        micro_batch_size=micro,
        global_batch_size=batch,
        precision=_precision(flags),
        recompute=flags["--recompute-granularity"],
        recompute_num_layers=flags["--recompute-num-layers"],
        use_distributed_optimizer=flags["--use-distributed-optimizer"],
        overlap_param_gather=flags["--overlap-param-gather"],
        overlap_grad_reduce=flags["--overlap-grad-reduce"],
        bucket_size=flags["--ddp-bucket-size"],
        backend=flags["--distributed-backend"] or ("gloo" if emulates(flags) else default_backend()),
        timeout_minutes=flags["--distributed-timeout-minutes"],
        heartbeat_timeout_s=flags["--hetero-heartbeat-timeout"],
    )


def _stages_per_rank(flags: FlagValues) -> int:
    """Stages that the ranks of a pipeline position hold, given as their number or by the layers of each."""
    given, pp = flags["--num-layers-per-virtual-pipeline-stage"], flags["--pipeline-model-parallel-size"]
    if given is None:
        stages: int = flags["--num-virtual-stages-per-pipeline-rank"]
        return stages
    per_rank, rest = divmod(flags["--num-layers"], given * pp)
    if rest:
        raise ConfigError(
            f"{flags.shown('--num-layers-per-virtual-pipeline-stage')} x --pipeline-model-parallel-size {pp} does not "
            f"divide {flags.shown('--num-layers')}: change one, or give an uneven plan with --hetero-plan"
        )
    return int(per_rank)


def _precision(flags: FlagValues) -> Precision | None:
    return "bf16" if flags["--bf16"] else "fp16" if flags["--fp16"] else None


def _loss_scale_options(flags: FlagValues) -> LossScaleOptions:
    if flags["--min-loss-scale"] > flags["--initial-loss-scale"]:
        raise ConfigError(f"{flags.shown('--min-loss-scale')} is above {flags.shown('--initial-loss-scale')}: lower it")
    return LossScaleOptions(
        constant=flags["--loss-scale"],
        initial=flags["--initial-loss-scale"],
        minimum=flags["--min-loss-scale"],
        window=flags["--loss-scale-window"],
        hysteresis=flags["--hysteresis"],
    )


def _planner_config(flags: FlagValues) -> PlannerConfig:
    return PlannerConfig(
        cluster=cluster_of(flags),
        profiles=flags["--hetero-profile"],
        data_sheets=flags["--hetero-data-sheets"],
        time_limit_s=flags["--hetero-plan-time-limit"],
        out=flags["--hetero-plan-out"],
    )


def _emulation_config(flags: FlagValues) -> EmulationConfig:
    return EmulationConfig(
        cluster=flags["--hetero-emulate"],
        profiles=flags["--hetero-profile"],
        data_sheets=flags["--hetero-data-sheets"],
        options=EmulationOptions(
            time_scale=flags["--hetero-emulate-time-scale"], seq_length=flags["--hetero-emulate-seq-length"]
        ),
    )


def _stage_options(flags: FlagValues) -> StageOptions:
    return StageOptions(
        attention_dropout=flags["--attention-dropout"],
        hidden_dropout=flags["--hidden-dropout"],
        init_method_std=flags["--init-method-std"],
        transformer_impl=flags["--transformer-impl"],
        moe_router_load_balancing=flags["--moe-router-load-balancing-type"] if has_experts(flags) else "none",
        moe_aux_loss_coeff=flags["--moe-aux-loss-coeff"],
    )
