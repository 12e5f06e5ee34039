"""Flags to configuration: what each flag does, what is refused, and with which words."""

import operator
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hetero.errors import ConfigError
from hetero.spec.model import RotaryScaling
from megatron.training.cli.arguments import parse_args
from megatron.training.cli.config import FLAGS, PretrainConfig
from megatron.training.cli.derived import default_backend
from megatron.training.cli.model_config import model_spec

BASE = {
    "--num-layers": "4",
    "--hidden-size": "48",
    "--num-attention-heads": "6",
    "--max-position-embeddings": "64",
    "--seq-length": "32",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--mock-data": None,
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--lr": "0.01",
    "--train-iters": "100",
    "--distributed-backend": "gloo",
}


def command(*parts: str, without: str = "") -> list[str]:
    """The words of a legal command line: ``BASE`` less ``without``, then ``parts``."""
    kept = {name: value for name, value in BASE.items() if name not in without.split()}
    words = [word for flag in kept.items() for word in flag if word is not None]
    return words + [word for part in parts for word in part.split()]


def parse(*parts: str, without: str = "") -> PretrainConfig:
    return parse_args(command(*parts, without=without))


class Effect(NamedTuple):
    """``flag``, added to the base and ``context``, makes ``path`` of the configuration ``value``."""

    flag: str
    path: str
    value: Any
    context: str = ""
    without: str = ""


MOE = "--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.5"
MOE_WITHOUT_LOSS = "--num-experts 4 --disable-bias-linear"
ROPE = "--position-embedding-type rope"
SCALED = f"{ROPE} --use-rope-scaling"
LLAMA3 = RotaryScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 10"
GROWING_DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
FILES = {"context": "--data-path a", "without": "--mock-data"}
SPLIT_FILES = {"context": "--train-data-path a", "without": "--mock-data"}
SAMPLES = {"context": "--train-samples 800", "without": "--train-iters"}
CLUSTER = {"context": "--hetero-cluster c.yaml", "without": "--micro-batch-size"}
EMULATED = {"context": "--hetero-emulate c.yaml", "without": "--micro-batch-size"}
PIPELINED = {"context": "--pipeline-model-parallel-size 2"}
PLAN = {"context": "--hetero-plan a.json", "without": "--micro-batch-size"}

EFFECTS = [
    Effect("--num-layers 8", "model.num_layers", 8),
    Effect("--hidden-size 96", "model.hidden_size", 96),
    Effect("--ffn-hidden-size 80", "model.ffn_hidden_size", 80),
    Effect("--num-attention-heads 3", "model.num_attention_heads", 3),
    Effect("--kv-channels 5", "model.kv_channels", 5),
    Effect("--group-query-attention", "model.num_query_groups", 1),
    Effect("--num-query-groups 3", "model.num_query_groups", 3, context="--group-query-attention"),
    Effect("--max-position-embeddings 128", "model.max_position_embeddings", 128),
    Effect("--position-embedding-type rope", "model.position_embedding", "rope"),
    Effect("--use-rotary-position-embeddings", "model.position_embedding", "rope"),
    Effect("--rotary-base 500000", "model.rotary_base", 500_000, context=ROPE),
    Effect("--rotary-percent 0.5", "model.rotary_percent", 0.5, context=ROPE),
    Effect("--rotary-base 1000000.5", "model.rotary_base", 1_000_000.5, context=ROPE),
    Effect(
        "--rotary-seq-len-interpolation-factor 2.5",
        "model.rotary_scaling",
        RotaryScaling(kind="linear", factor=2.5),
        context=ROPE,
    ),
    Effect("--use-rope-scaling", "model.rotary_scaling", LLAMA3, context=ROPE),
    Effect("--rope-scaling-factor 32", "model.rotary_scaling.factor", 32.0, context=SCALED),
    Effect("--hetero-rope-low-freq-factor 2", "model.rotary_scaling.low_freq_factor", 2.0, context=SCALED),
    Effect("--hetero-rope-high-freq-factor 5", "model.rotary_scaling.high_freq_factor", 5.0, context=SCALED),
    Effect(
        "--hetero-rope-original-max-positions 4096",
        "model.rotary_scaling.original_max_position_embeddings",
        4096,
        context=SCALED,
    ),
    Effect("--hetero-add-proj-bias", "model.proj_bias", True, context="--disable-bias-linear"),
    Effect("--normalization RMSNorm", "model.normalization", "RMSNorm"),
    Effect("--norm-epsilon 1e-6", "model.norm_epsilon", 1e-6),
    Effect("--swiglu", "model.activation", "swiglu"),
    Effect("--disable-bias-linear", "model.linear_bias", False),
    Effect("--add-qkv-bias", "model.qkv_bias", True, context="--disable-bias-linear"),
    Effect("--qk-layernorm", "model.qk_layernorm", True),
    Effect("--untie-embeddings-and-output-weights", "model.tied_embeddings", False),
    Effect("--vocab-size 200", "model.vocab_size", 200),
    Effect("--make-vocab-size-divisible-by 64", "model.make_vocab_size_divisible_by", 64),
    Effect("--num-experts 4", "model.num_experts", 4, context="--disable-bias-linear"),
    Effect("--moe-router-topk 1", "model.moe_router_topk", 1, context=MOE),
    Effect("--moe-ffn-hidden-size 16", "model.moe_ffn_hidden_size", 16, context=MOE),
    Effect(
        "--moe-router-load-balancing-type none", "stage.moe_router_load_balancing", "none", context=MOE_WITHOUT_LOSS
    ),
    Effect("--moe-aux-loss-coeff 0.1", "stage.moe_aux_loss_coeff", 0.1, context=MOE),
    Effect("--init-method-std 0.01", "stage.init_method_std", 0.01),
    Effect("--transformer-impl local", "stage.transformer_impl", "local"),
    Effect("--attention-dropout 0", "stage.attention_dropout", 0.0),
    Effect("--hidden-dropout 0.2", "stage.hidden_dropout", 0.2),
    Effect("--weight-decay 0.1", "optimizer.weight_decay", 0.1),
    Effect("--weight-decay-incr-style cosine", "optimizer.weight_decay_incr_style", "cosine", context=GROWING_DECAY),
    Effect("--start-weight-decay 0", "optimizer.start_weight_decay", 0.0, context=GROWING_DECAY),
    Effect("--end-weight-decay 0.4", "optimizer.end_weight_decay", 0.4, context=GROWING_DECAY),
    Effect("--clip-grad 0", "optimizer.clip_grad", 0.0),
    Effect("--seq-length 64", "data.seq_length", 64),
    Effect("--data-path 0.3 b 0.7 c", "data.data_path", ("0.3", "b", "0.7", "c"), **FILES),
    Effect("--train-data-path b c", "data.train_data_path", ("b", "c"), **SPLIT_FILES),
    Effect("--valid-data-path v", "data.valid_data_path", ("v",), **SPLIT_FILES),
    Effect("--test-data-path t", "data.test_data_path", ("t",), **SPLIT_FILES),
    Effect("--split 9,1", "data.split", "9,1", **FILES),
    Effect("--data-cache-path cache", "data.data_cache_path", Path("cache"), **FILES),
    Effect("--mock-data", "data.mock_data", True),
    Effect("--tokenizer-type ByteLevelTokenizer", "data.tokenizer_type", "ByteLevelTokenizer"),
    Effect(
        "--tokenizer-model b.json",
        "data.tokenizer_model",
        "b.json",
        context="--tokenizer-type HuggingFaceTokenizer --tokenizer-model a.json",
    ),
    Effect("--eod-mask-loss", "data.eod_mask_loss", True),
    Effect("--num-workers 0", "data.num_workers", 0),
    Effect("--adam-beta1 0.8", "optimizer.adam_beta1", 0.8),
    Effect("--adam-beta2 0.95", "optimizer.adam_beta2", 0.95),
    Effect("--adam-eps 1e-9", "optimizer.adam_eps", 1e-9),
    Effect("--lr 0.02", "optimizer.lr", 0.02),
    Effect("--min-lr 0.001", "optimizer.min_lr", 0.001),
    Effect("--lr-decay-style inverse-square-root", "optimizer.lr_decay_style", "inverse-square-root"),
    Effect("--lr-decay-iters 50", "optimizer.lr_decay_iters", 50),
    Effect("--lr-decay-samples 400", "optimizer.lr_decay_iters", 50, **SAMPLES),
    Effect("--lr-warmup-iters 7", "optimizer.lr_warmup_iters", 7),
    Effect("--lr-warmup-samples 56", "optimizer.lr_warmup_iters", 7, **SAMPLES),
    Effect("--lr-warmup-fraction 0.1", "optimizer.lr_warmup_fraction", 0.1),
    Effect("--lr-warmup-init 0.001", "optimizer.lr_warmup_init", 0.001),
    Effect("--lr-wsd-decay-style minus_sqrt", "optimizer.lr_wsd_decay_style", "minus_sqrt", context=WSD),
    Effect("--lr-wsd-decay-iters 20", "optimizer.lr_wsd_decay_iters", 20, context=WSD),
    Effect(
        "--lr-wsd-decay-samples 160",
        "optimizer.lr_wsd_decay_iters",
        20,
        context="--train-samples 800 --lr-decay-style WSD --lr-wsd-decay-samples 80",
        without="--train-iters",
    ),
    Effect("--hetero-plan b.json", "parallel.hetero_plan", Path("b.json"), **PLAN),
    Effect("--hetero-cluster c.yaml", "parallel.hetero_cluster", Path("c.yaml"), **PLAN),
    Effect("--hetero-profile a.json b.json", "parallel.planner.profiles", (Path("a.json"), Path("b.json")), **CLUSTER),
    Effect("--hetero-data-sheets", "parallel.planner.data_sheets", True, **CLUSTER),
    Effect("--hetero-plan-time-limit 5", "parallel.planner.time_limit_s", 5.0, **CLUSTER),
    Effect("--hetero-plan-out p.json", "parallel.planner.out", Path("p.json"), **CLUSTER),
    Effect("--hetero-emulate e.yaml", "emulation.cluster", Path("e.yaml"), **EMULATED),
    Effect("--hetero-emulate-time-scale 3", "emulation.options.time_scale", 3.0, **EMULATED),
    Effect("--hetero-emulate-seq-length 64", "emulation.options.seq_length", 64, **EMULATED),
    Effect("--hetero-schedule gpipe", "parallel.schedule", "gpipe"),
    Effect("--tensor-model-parallel-size 2", "parallel.tensor_model_parallel_size", 2),
    Effect("--pipeline-model-parallel-size 2", "parallel.pipeline_model_parallel_size", 2),
    Effect("--num-virtual-stages-per-pipeline-rank 2", "parallel.stages_per_rank", 2),
    Effect("--num-layers-per-virtual-pipeline-stage 1", "parallel.stages_per_rank", 2, **PIPELINED),
    Effect("--sequence-parallel", "parallel.sequence_parallel", True),
    Effect("--micro-batch-size 4", "parallel.micro_batch_size", 4),
    Effect("--global-batch-size 16", "parallel.global_batch_size", 16),
    Effect("--recompute-granularity selective", "parallel.recompute", "selective"),
    Effect("--recompute-num-layers 2", "parallel.recompute_num_layers", 2, context="--recompute-granularity full"),
    Effect("--use-distributed-optimizer", "parallel.use_distributed_optimizer", True),
    Effect("--overlap-param-gather", "parallel.overlap_param_gather", True, context="--use-distributed-optimizer"),
    Effect("--bf16", "parallel.precision", "bf16"),
    Effect("--fp16", "parallel.precision", "fp16"),
    Effect("--loss-scale 128", "loss_scale.constant", 128.0, context="--fp16"),
    Effect("--initial-loss-scale 256", "loss_scale.initial", 256.0, context="--fp16"),
    Effect("--min-loss-scale 2", "loss_scale.minimum", 2.0, context="--fp16"),
    Effect("--loss-scale-window 10", "loss_scale.window", 10, context="--fp16"),
    Effect("--hysteresis 1", "loss_scale.hysteresis", 1, context="--fp16"),
    Effect("--save out", "checkpoint.save", Path("out")),
    Effect("--save-interval 5", "checkpoint.save_interval", 5, context="--save out"),
    Effect("--hetero-keep-last 3", "checkpoint.keep_last", 3, context="--save out"),
    Effect("--async-save", "checkpoint.asynchronous", True, context="--save out"),
    Effect("--load out", "checkpoint.load", Path("out")),
    Effect("--ckpt-step 7", "checkpoint.load_step", 7, context="--load out"),
    Effect("--finetune", "checkpoint.finetune", True, context="--load out"),
    Effect("--eval-iters 10", "run.eval_iters", 10),
    Effect("--eval-interval 20", "run.eval_interval", 20, context="--eval-iters 10"),
    Effect("--exit-interval 30", "run.exit_interval", 30),
    Effect("--exit-duration-in-mins 1.5", "run.exit_duration_minutes", 1.5),
    Effect("--no-overlap-grad-reduce", "parallel.overlap_grad_reduce", False),
    Effect("--overlap-grad-reduce", "parallel.overlap_grad_reduce", True, context="--no-overlap-grad-reduce"),
    Effect("--ddp-bucket-size 1000", "parallel.bucket_size", 1000),
    Effect("--distributed-backend nccl", "parallel.backend", "nccl"),
    Effect("--distributed-timeout-minutes 0.5", "parallel.timeout_minutes", 0.5),
    Effect("--hetero-heartbeat-timeout 60", "parallel.heartbeat_timeout_s", 60.0),
    Effect("--train-iters 50", "run.train_iters", 50),
    Effect("--train-samples 400", "run.train_iters", 50, **SAMPLES),
    Effect("--seed 1", "run.seed", 1),
    Effect("--seed 1", "data.seed", 1),
    Effect("--no-check-for-nan-in-loss-and-grad", "run.check_for_nan", False),
    Effect(
        "--check-for-nan-in-loss-and-grad", "run.check_for_nan", True, context="--no-check-for-nan-in-loss-and-grad"
    ),
    Effect("--log-interval 1", "run.log_interval", 1),
    Effect("--tensorboard-dir logs", "run.tensorboard_dir", Path("logs")),
    Effect("--no-progress", "run.progress", False),
]

SINGLE_VALUES = {
    "--optimizer": ("adam", "sgd"),
    "--context-parallel-size": ("1", "2"),
    "--expert-model-parallel-size": ("1", "8"),
}
"""Flags with one legal value: that and an illegal one."""


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: f"{effect.flag}-{effect.path}")
def test_flag_changes_the_configuration(effect: Effect) -> None:
    if effect.flag == "--mock-data":  # the base has it; the alternative is files
        before = parse("--data-path a", without="--mock-data")
    else:
        before = parse(effect.context, without=effect.without)
    after = parse(effect.context, effect.flag, without=effect.without)
    found = operator.attrgetter(effect.path)
    assert found(after) == effect.value
    assert found(before) != effect.value


def test_every_supported_flag_has_a_tested_effect() -> None:
    tested = {effect.flag.split()[0] for effect in EFFECTS} | set(SINGLE_VALUES)
    assert tested == {name for flag in FLAGS for name in flag.names}


@pytest.mark.parametrize(("flag", "values"), SINGLE_VALUES.items())
def test_flag_with_one_legal_value(flag: str, values: tuple[str, str]) -> None:
    legal, illegal = values
    assert parse(f"{flag} {legal}") == parse()
    with pytest.raises(ConfigError, match=f"^{flag}: '{illegal}' is not {legal}, the only value supported"):
        parse(f"{flag} {illegal}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.ffn_hidden_size", 4 * 48),
        ("model.kv_channels", 8),
        ("model.num_query_groups", 6),
        ("model.position_embedding", "learned_absolute"),
        ("model.normalization", "LayerNorm"),
        ("model.norm_epsilon", 1e-5),
        ("model.make_vocab_size_divisible_by", 128),
        ("model.rotary_base", 10_000),
        ("model.num_experts", None),
        ("model.moe_ffn_hidden_size", None),
        ("data.split", "969, 30, 1"),
        ("data.num_workers", 2),
        ("optimizer.min_lr", 0.0),
        ("optimizer.lr_decay_style", "linear"),
        ("optimizer.lr_decay_iters", None),
        ("optimizer.lr_warmup_iters", 0),
        ("optimizer.weight_decay", 0.01),
        ("optimizer.start_weight_decay", 0.01),
        ("optimizer.end_weight_decay", 0.01),
        ("optimizer.clip_grad", 1.0),
        ("optimizer.adam_beta1", 0.9),
        ("optimizer.adam_beta2", 0.999),
        ("optimizer.adam_eps", 1e-8),
        ("parallel.recompute", "none"),
        ("parallel.precision", None),
        ("loss_scale.constant", None),
        ("loss_scale.initial", 2.0**32),
        ("loss_scale.window", 1000),
        ("checkpoint.save", None),
        ("run.eval_iters", 0),
        ("parallel.schedule", "1f1b"),
        ("parallel.stages_per_rank", 1),
        ("parallel.bucket_size", 40_000_000),
        ("parallel.timeout_minutes", 10),
        ("run.seed", 1234),
        ("run.log_interval", 100),
        ("run.progress", True),
        ("stage.attention_dropout", 0.1),
        ("stage.hidden_dropout", 0.1),
        ("stage.init_method_std", 0.02),
        ("stage.transformer_impl", "auto"),
        ("stage.moe_router_load_balancing", "none"),
    ],
)
def test_default(path: str, value: Any) -> None:
    assert operator.attrgetter(path)(parse()) == value


def test_gated_mlp_is_megatrons_two_thirds_down_to_a_multiple_of_64() -> None:
    assert parse("--swiglu --hidden-size 4096 --num-attention-heads 32").model.ffn_hidden_size == 10_880
    assert parse("--swiglu --ffn-hidden-size 7").model.ffn_hidden_size == 7


def test_experts_are_as_wide_as_the_mlp_unless_told() -> None:
    assert parse(MOE, "--ffn-hidden-size 80").model.moe_ffn_hidden_size == 80


def test_a_plan_replaces_the_uniform_plans_flags() -> None:
    parallel = parse("--hetero-plan plan.json", without="--micro-batch-size").parallel
    assert parallel.hetero_plan == Path("plan.json")
    assert parallel.micro_batch_size is None


def test_planning_at_start_needs_a_cluster_and_no_plan_file() -> None:
    without = "--micro-batch-size"
    for flags in ("--hetero-cluster c.yaml", "--hetero-cluster c.yaml --hetero-plan auto"):
        parallel = parse(flags, without=without).parallel
        assert parallel.hetero_plan is None
        assert parallel.planner is not None
        assert parallel.planner.cluster == parallel.hetero_cluster == Path("c.yaml")
    checked = parse("--hetero-cluster c.yaml --hetero-plan a.json", without=without).parallel
    assert checked.planner is None
    assert checked.hetero_cluster == Path("c.yaml")


def test_an_emulated_cluster_is_planned_for_like_a_real_one() -> None:
    without = "--micro-batch-size"
    config = parse("--hetero-emulate c.yaml --hetero-profile p.json", without=without)
    assert config.parallel.hetero_cluster == Path("c.yaml")
    assert config.parallel.planner is not None
    assert config.parallel.planner.cluster == Path("c.yaml")
    assert config.parallel.backend == "gloo"
    assert config.emulation is not None
    assert config.emulation.profiles == (Path("p.json"),)
    with_plan = parse("--hetero-emulate c.yaml --hetero-plan a.json --hetero-data-sheets", without=without)
    assert with_plan.parallel.planner is None
    assert with_plan.emulation is not None
    assert with_plan.emulation.data_sheets


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-model-parallel-size 1",
        "--pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--micro-batch-size 1",
        "--sequence-parallel",
        "--recompute-granularity full",
        "--recompute-num-layers 1",
        "--hetero-schedule gpipe",
    ],
)
def test_a_plan_states_what_the_uniform_plans_flags_would(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} beside --hetero-plan plan.json: the plan states it"):
        parse("--hetero-plan plan.json", flag, without="--micro-batch-size")
    with pytest.raises(ConfigError, match=f"^{flag} beside --hetero-cluster c.yaml: the plan states it"):
        parse("--hetero-cluster c.yaml", flag, without="--micro-batch-size")


@pytest.mark.parametrize(
    ("flags", "without", "message"),
    [
        # Missing.
        ("", "--num-layers --lr", "required and missing: --num-layers, --lr"),
        ("", "--micro-batch-size", "required and missing: --micro-batch-size (or --hetero-plan, --hetero-cluster or"),
        ("", "--train-iters", "required and missing: --train-iters (or --train-samples)"),
        ("", "--mock-data", "required and missing: --data-path (or --train-data-path, or --mock-data)"),
        ("--weight-decay-incr-style linear --start-weight-decay 0.1", "", "needs both --start-weight-decay and --end"),
        ("--lr-decay-style WSD", "", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --train-samples 80", "--train-iters", "needs --lr-wsd-decay-samples"),
        ("--tokenizer-type HuggingFaceTokenizer", "", "needs --tokenizer-model"),
        ("", "--vocab-size", "NullTokenizer needs --vocab-size"),
        # Contradictions.
        ("--train-samples 800", "", "--train-iters 100 and --train-samples 800 exclude each other"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", "", "exclude each other"),
        ("--train-samples 80 --lr-warmup-samples 8 --lr-warmup-fraction 0.1", "--train-iters", "exclude each other"),
        ("--data-path a b", "", "--mock-data and --data-path a b exclude each other"),
        ("--train-data-path a", "", "--mock-data and --train-data-path a exclude each other"),
        ("--data-path a --valid-data-path b", "--mock-data", "exclude each other"),
        ("--position-embedding-type learned_absolute --use-rotary-position-embeddings", "", "exclude each other"),
        ("--lr-decay-samples 80", "", "--lr-decay-samples 80 beside --train-iters 100: use --lr-decay-iters"),
        ("--lr-warmup-iters 1 --train-samples 80", "--train-iters", "use --lr-warmup-samples with --train-samples"),
        ("--hetero-plan auto", "--micro-batch-size", "--hetero-plan auto: plans for a cluster, so add"),
        (
            "--hetero-emulate c --distributed-backend nccl",
            "--micro-batch-size",
            "--distributed-backend nccl beside --hetero-emulate: the CPU computes; leave the backend out",
        ),
        (
            "--hetero-emulate c --hetero-cluster c",
            "--micro-batch-size",
            "--hetero-cluster c and --hetero-emulate c exclude each other",
        ),
        (
            "--hetero-emulate-time-scale 2",
            "",
            "--hetero-emulate-time-scale 2.0 has no effect without --hetero-emulate: add that",
        ),
        (
            "--hetero-cluster c --hetero-plan-time-limit 900",
            "--micro-batch-size",
            "lower the first or raise the second",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
            "",
            "--num-virtual-stages-per-pipeline-rank 2 and --num-layers-per-virtual-pipeline-stage 1 exclude each other",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "",
            "--num-layers-per-virtual-pipeline-stage 3 x --pipeline-model-parallel-size 2 does not divide "
            "--num-layers 4: change one, or give an uneven plan with --hetero-plan",
        ),
        ("--bf16 --fp16", "", "--bf16 and --fp16 exclude each other"),
        ("--fp16 --loss-scale 8 --hysteresis 1", "", "--loss-scale 8.0 and --hysteresis 1 exclude each other"),
        ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "", "--min-loss-scale 4.0 is above --initial-loss-scale"),
        # No effect.
        ("--bf16 --loss-scale 8", "", "--loss-scale 8.0 has no effect without --fp16"),
        ("--recompute-num-layers 2", "", "has no effect without --recompute-granularity full"),
        ("--overlap-param-gather", "", "has no effect without --use-distributed-optimizer"),
        ("--hetero-cluster c --overlap-param-gather", "--micro-batch-size", "without --use-distributed-optimizer"),
        ("--save-interval 5", "", "--save-interval 5 has no effect without --save"),
        ("--finetune", "", "--finetune has no effect without --load"),
        ("--eval-interval 5", "", "--eval-interval 5 has no effect without --eval-iters above 0"),
        ("--hetero-plan-out p.json", "", "--hetero-plan-out p.json has no effect without a cluster and no plan"),
        ("--hetero-cluster c --hetero-plan p --hetero-data-sheets", "--micro-batch-size", "has no effect without"),
        ("--num-query-groups 2", "", "--num-query-groups 2 has no effect without --group-query-attention"),
        ("--rotary-base 10000", "", "has no effect without --position-embedding-type rope"),
        ("--moe-router-topk 2", "", "--moe-router-topk 2 has no effect without --num-experts"),
        (f"{MOE} --moe-router-load-balancing-type none", "", "without --moe-router-load-balancing-type aux_loss"),
        ("--lr-wsd-decay-iters 10", "", "has no effect without --lr-decay-style WSD"),
        ("--start-weight-decay 0.1", "", "has no effect without --weight-decay-incr-style linear or cosine"),
        (f"{GROWING_DECAY} --weight-decay 0.1", "", "--weight-decay 0.1 has no effect"),
        ("--data-path a --tokenizer-model t", "--mock-data", "--tokenizer-model t has no effect"),
        ("--split 1", "", "--split 1 has no effect without --data-path"),
        ("--data-cache-path c", "", "--data-cache-path c has no effect without --data-path"),
        # Numbers that do not fit one another.
        ("--num-attention-heads 5", "", "--num-attention-heads 5 does not divide --hidden-size 48"),
        ("--group-query-attention --num-query-groups 4", "", "--num-query-groups 4 does not divide"),
        ("--position-embedding-type rope --rotary-percent 0.4", "", "rotates 3 channels"),
        ("--use-rope-scaling", "", "has no effect without --position-embedding-type rope"),
        (f"{ROPE} --rope-scaling-factor 32", "", "has no effect without --use-rope-scaling"),
        (f"{SCALED} --rotary-seq-len-interpolation-factor 4", "", "exclude each other"),
        (f"{SCALED} --rope-scaling-factor 0.5", "", "'0.5' is not a number of at least 1"),
        (f"{SCALED} --hetero-rope-low-freq-factor 4", "", "4.0 is not below --hetero-rope-high-freq-factor 4.0"),
        ("--hetero-add-proj-bias", "", "has no effect without --disable-bias-linear"),
        ("--hidden-size 12 --swiglu", "", "--hidden-size 12 with --swiglu"),
        ("--seq-length 65", "", "--max-position-embeddings 64 is below --seq-length 65"),
        ("--num-experts 4", "", "add --disable-bias-linear"),
        (f"{MOE} --moe-router-topk 5", "", "--moe-router-topk 5 exceeds --num-experts 4"),
        ("--min-lr 0.1", "", "--min-lr 0.1 is above --lr 0.01"),
        ("--lr-warmup-init 0.1", "", "--lr-warmup-init 0.1 is above --lr 0.01"),
        ("--lr-warmup-iters 100", "", "the warmup of 100 steps does not end before"),
        ("--lr-warmup-iters 50 --lr-decay-iters 50", "", "lower --lr-warmup-iters"),
        (f"{WSD} --lr-warmup-iters 91", "", "do not fit into the 100 steps"),
        (f"{WSD} --lr-warmup-fraction 0.91", "", "do not fit into the 100 steps"),
        (f"{GROWING_DECAY} --end-weight-decay 0.05", "", "is below --start-weight-decay 0.1"),
        (
            "--train-samples 81",
            "--train-iters",
            "is no multiple of --global-batch-size 8: round it, for instance to 88",
        ),
        ("--train-samples 80 --lr-decay-samples 9", "--train-iters", "--lr-decay-samples 9 is no multiple"),
        ("--micro-batch-size 3", "", "--global-batch-size 8 is no multiple of --micro-batch-size 3"),
        # Values of the wrong kind.
        ("--num-layers 0", "", "--num-layers: '0' is not a whole number of at least 1"),
        ("--num-layers 2.5", "", "--num-layers: '2.5' is not a whole number"),
        ("--num-layers=", "", "--num-layers: '' is not a whole number"),
        ("--lr nan", "", "--lr: 'nan' is not a number above 0"),
        ("--lr -1e-4", "", "--lr: '-1e-4' is not a number above 0"),
        ("--seed -1", "", "--seed: '-1' is not a whole number of at least 0"),
        ("--hidden-dropout 1", "", "--hidden-dropout: '1' is not a number from 0 to below 1"),
        ("--rotary-percent 0", "", "--rotary-percent: '0' is not a number above 0 and up to 1"),
        ("--lr-decay-style cosin", "", "(did you mean 'cosine'?)"),
        ("--tokenizer-type GPT2BPETokenizer", "", "HuggingFaceTokenizer (which reads any model's tokenizer.json)"),
        ("--split 0,1", "", "--split: '0,1' is not one to three shares"),
        ("--split 1e2,1", "", "--split: '1e2,1' is not one to three shares"),
        ("--tensorboard-dir=", "", "--tensorboard-dir: '' is not a name"),
        ("--lr", "", "--lr: expected one argument"),
        ("--data-path --swiglu", "--mock-data", "--data-path: expected at least one argument"),
        # Values without a flag.
        ("--swiglu true", "", "--swiglu takes no value, found 'true'"),
        ("--swiglu=true", "", "--swiglu takes no value, found 'true'"),
        ("--seed 1 2", "", "unexpected '2' after the value of --seed"),
        ("--seed=1 2", "", "unexpected '2' after the value of --seed"),
        # Names.
        ("--micro-batchsize 4", "", "unknown flag --micro-batchsize (did you mean '--micro-batch-size'?)"),
        ("--num_layers=4", "", "unknown flag --num_layers (did you mean '--num-layers'?)"),
        ("--zzz", "", "unknown flag --zzz"),
        ("--", "", "unknown flag --"),
        ("-x", "", "unknown flag -x"),
        ("--seq 32", "", "unknown flag --seq "),
    ],
)
def test_refused(flags: str, without: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(flags, without=without)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--distributed-timeout-minutes 0.0001", "'0.0001' is not a number of minutes from 0.5, in which"),
        (
            "--hetero-heartbeat-timeout 1",
            "'1' is not a number of seconds from 3, as ranks give one sign a second",
        ),
        ("--distributed-timeout-minutes 1e-300", "is not a number of minutes from 0.5"),
        ("--distributed-timeout-minutes 1e300", "to 10080, a week"),
        ("--distributed-timeout-minutes nan", "is not a number of minutes"),
        ("--hetero-plan-time-limit 1e-9", "is not a number of seconds from 0.1 to 604800, a week"),
        ("--hetero-plan-time-limit 1e300", "is not a number of seconds from 0.1 to 604800, a week"),
        ("--hetero-emulate-time-scale 1e-300", "is not a number from 0.0001 to 10000"),
        ("--hetero-emulate-time-scale 1e300", "is not a number from 0.0001 to 10000"),
        ("--initial-loss-scale 1e300", "is not a number above 0 and up to 2^127"),
        ("--lr inf", "'inf' is not a number above 0"),
        ("--lr nan", "'nan' is not a number above 0"),
        ("--seed 4294967296", "is not a whole number of at least 0 and at most 4294967295"),
        ("--num-workers 100000", "is not a whole number of at least 0 and at most 1024"),
        ("--train-iters 9223372036854775808", "at most 1000000000000"),
        (f"--train-iters {'9' * 5000}", "'" + "9" * 60 + "...' is not a whole number"),
        (f"--split {'9' * 400},1", "is not one to three shares"),
    ],
)
def test_a_value_near_zero_or_beyond_reason_is_refused_at_once(flag: str, message: str) -> None:
    """Further on, they end in tracebacks of whoever takes them: TCPStore, timedelta, numpy, the loader's processes."""
    with pytest.raises(ConfigError) as error:
        parse(flag)
    assert message in str(error.value)
    assert str(error.value).startswith(flag.split()[0])


def test_a_value_in_front_of_every_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected 'pretrain_gpt"):
        parse_args(["pretrain_gpt.py", *command()])


def test_a_flag_and_its_value_may_be_one_word() -> None:
    assert parse("--seed=7") == parse("--seed 7")


def test_the_last_of_equal_flags_counts() -> None:
    assert parse("--seed 7 --seed 8").run.seed == 8


def test_sample_counts_become_steps() -> None:
    by_samples = parse("--train-samples 800 --lr-warmup-samples 80", without="--train-iters")
    assert by_samples == parse("--lr-warmup-iters 10")


def test_a_fraction_of_warmup_is_handed_on() -> None:
    optimizer = parse("--lr-warmup-fraction 0.25").optimizer
    assert (optimizer.lr_warmup_fraction, optimizer.lr_warmup_iters) == (0.25, 0)


def test_help_prints_every_flag_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_args(["--save", "x", "--help"])
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert [name for flag in FLAGS for name in flag.names if name not in printed] == []


@pytest.mark.parametrize(("cuda", "backend"), [(True, "nccl"), (False, "gloo")])
def test_backend_follows_cuda(cuda: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert default_backend() == backend
    assert parse(without="--distributed-backend").parallel.backend == backend


def test_flags_with_a_stated_backend_need_no_torch() -> None:
    program = (
        "import sys; from megatron.training.cli.arguments import parse_args; parse_args(sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", program, *command()], cwd=root, check=True, timeout=60)


class TestModelSpec:
    def test_takes_the_tokenizers_vocabulary_and_pads_it(self) -> None:
        config = parse("--tokenizer-type ByteLevelTokenizer", without="--vocab-size").model
        spec = model_spec(config, tokenizer_vocab_size=257)
        assert (spec.vocab_size, spec.padded_vocab_size) == (257, 384)

    def test_takes_a_larger_vocabulary_from_the_flag(self) -> None:
        spec = model_spec(parse("--vocab-size 300").model, tokenizer_vocab_size=257)
        assert (spec.vocab_size, spec.padded_vocab_size) == (300, 384)

    def test_refuses_a_vocabulary_below_the_tokenizers(self) -> None:
        with pytest.raises(ConfigError, match="--vocab-size 100 is below the 257 tokens of the tokenizer"):
            model_spec(parse().model, tokenizer_vocab_size=257)

    @pytest.mark.parametrize(
        "flags",
        [
            "",
            "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
            "--position-embedding-type rope --rotary-base 500000 --group-query-attention --num-query-groups 2",
            f"{MOE} --moe-ffn-hidden-size 16",
            f"{SCALED} --rotary-base 500000.5 --disable-bias-linear --add-qkv-bias --hetero-add-proj-bias",
        ],
    )
    def test_has_every_other_number_of_the_model(self, flags: str) -> None:
        config = parse(flags).model
        spec = model_spec(config, tokenizer_vocab_size=100)
        shared = set(config.__slots__) - {"make_vocab_size_divisible_by"}
        assert shared | {"padded_vocab_size"} == set(spec.__slots__)
        assert {name: getattr(spec, name) for name in shared} == {name: getattr(config, name) for name in shared}
