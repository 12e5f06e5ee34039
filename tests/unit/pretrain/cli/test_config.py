"""Flags to configuration: what each flag does, and what holds without it."""

import operator
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hetero.errors import ConfigError
from hetero.plan.batch_sizes import BatchRampup, BatchSchedule
from hetero.spec.model import RotaryScaling
from megatron.pretrain.cli.config import FLAGS
from tests.helpers.flags import GROWING_DECAY, MOE, ROPE, SCALED, WSD, command, parse


class Effect(NamedTuple):
    """``flag``, added to the base and ``context``, makes ``path`` of the configuration ``value``."""

    flag: str
    path: str
    value: Any
    context: str = ""
    without: str = ""


MOE_WITHOUT_LOSS = "--num-experts 4 --disable-bias-linear"
LLAMA3 = RotaryScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
FILES = {"context": "--data-path a", "without": "--mock-data"}
GPT2 = {"context": "--vocab-file a --merge-file b", "without": "--tokenizer-type"}
SPLIT_FILES = {"context": "--train-data-path a", "without": "--mock-data"}
SAMPLES = {"context": "--train-samples 800", "without": "--train-iters"}
SCHEDULE = BatchSchedule(seq_length=32, entries=((0, 2), (1000, 8)))
SCHEDULED = {
    "context": "--train-samples 801 --step-batch-size-schedule 0:4",
    "without": "--train-iters --global-batch-size",
}
CLUSTER = {"context": "--hetero-cluster c.yaml", "without": "--micro-batch-size"}
EMULATED = {"context": "--hetero-emulate c.yaml", "without": "--micro-batch-size"}
PIPELINED = {"context": "--pipeline-model-parallel-size 2"}
PLAN = {"context": "--hetero-plan a.json", "without": "--micro-batch-size"}
EVENTS = {"context": "--tensorboard-dir logs"}
WANDB = {"context": "--wandb-project p"}
TORCH_PROFILER = {"context": "--profile --use-pytorch-profiler --tensorboard-dir logs"}

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
    Effect("--hetero-relu", "model.activation", "relu"),
    Effect("--disable-bias-linear", "model.linear_bias", False),
    Effect("--add-qkv-bias", "model.qkv_bias", True, context="--disable-bias-linear"),
    Effect("--qk-layernorm", "model.qk_layernorm", True),
    Effect("--untie-embeddings-and-output-weights", "model.tied_embeddings", False),
    Effect("--vocab-size 200", "model.vocab_size", 200),
    Effect("--make-vocab-size-divisible-by 64", "model.make_vocab_size_divisible_by", 64),
    Effect("--no-pad-vocab-size", "model.make_vocab_size_divisible_by", 1),
    Effect("--disable-pad-vocab-size", "model.make_vocab_size_divisible_by", 1),
    Effect("--num-experts 4", "model.num_experts", 4, context="--disable-bias-linear"),
    Effect("--moe-router-topk 1", "model.moe_router_topk", 1, context=MOE),
    Effect("--moe-ffn-hidden-size 16", "model.moe_ffn_hidden_size", 16, context=MOE),
    Effect(
        "--moe-router-load-balancing-type none", "stage.moe_router_load_balancing", "none", context=MOE_WITHOUT_LOSS
    ),
    Effect(
        "--moe-router-load-balancing-type seq_aux_loss",
        "stage.moe_router_load_balancing",
        "seq_aux_loss",
        context=MOE,
    ),
    Effect("--moe-aux-loss-coeff 0.1", "stage.moe_aux_loss_coeff", 0.1, context=MOE),
    Effect("--init-method-std 0.01", "stage.init_method_std", 0.01),
    Effect("--no-gradient-accumulation-fusion", "stage.gradient_accumulation_fusion", False),
    Effect("--transformer-impl local", "stage.transformer_impl", "local"),
    Effect("--attention-backend flash", "stage.attention_backend", "flash"),
    Effect("--no-masked-softmax-fusion", "stage.masked_softmax_fusion", False),
    Effect("--no-bias-gelu-fusion", "stage.bias_gelu_fusion", False),
    Effect("--no-bias-swiglu-fusion", "stage.bias_swiglu_fusion", False),
    Effect("--no-bias-dropout-fusion", "stage.bias_dropout_fusion", False),
    Effect("--no-rope-fusion", "stage.rope_fusion", False),
    Effect("--no-persist-layer-norm", "stage.persist_layer_norm", False),
    Effect("--cross-entropy-loss-fusion", "stage.cross_entropy_loss_fusion", True),
    Effect("--fp8-format hybrid", "stage.fp8_format", "hybrid", context="--bf16"),
    Effect("--fp8-recipe blockwise", "stage.fp8_recipe", "blockwise", context="--bf16 --fp8-format e4m3"),
    Effect("--fp8-amax-history-len 16", "stage.fp8_amax_history_len", 16, context="--bf16 --fp8-format e4m3"),
    Effect("--fp8-amax-compute-algo max", "stage.fp8_amax_compute_algo", "max", context="--bf16 --fp8-format e4m3"),
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
    Effect("--vocab-file v", "data.vocab_file", Path("v"), **GPT2),
    Effect("--merge-file m", "data.merge_file", Path("m"), **GPT2),
    Effect("--null-tokenizer-eod-id 7", "data.null_eod", 7),
    Effect("--eod-mask-loss", "data.eod_mask_loss", True),
    Effect("--num-workers 0", "data.num_workers", 0),
    Effect("--adam-beta1 0.8", "optimizer.adam_beta1", 0.8),
    Effect("--adam-beta2 0.95", "optimizer.adam_beta2", 0.95),
    Effect("--adam-eps 1e-9", "optimizer.adam_eps", 1e-9),
    Effect("--lr 0.02", "optimizer.lr", 0.02),
    Effect("--min-lr 0.001", "optimizer.min_lr", 0.001),
    Effect("--decoupled-lr 0.003", "optimizer.decoupled_lr", 0.003),
    Effect("--decoupled-min-lr 0.001", "optimizer.decoupled_min_lr", 0.001, context="--decoupled-lr 0.003"),
    Effect("--lr-decay-style inverse-square-root", "optimizer.lr_decay_style", "inverse-square-root"),
    Effect("--lr-decay-iters 50", "optimizer.lr_decay_samples", 400),
    Effect("--lr-decay-samples 401", "optimizer.lr_decay_samples", 401, **SAMPLES),
    Effect("--lr-warmup-iters 7", "optimizer.lr_warmup_samples", 56),
    Effect("--lr-warmup-samples 57", "optimizer.lr_warmup_samples", 57, **SAMPLES),
    Effect("--lr-warmup-fraction 0.1", "optimizer.lr_warmup_fraction", 0.1),
    Effect("--lr-warmup-init 0.001", "optimizer.lr_warmup_init", 0.001),
    Effect("--lr-wsd-decay-style minus_sqrt", "optimizer.lr_wsd_decay_style", "minus_sqrt", context=WSD),
    Effect("--lr-wsd-decay-iters 20", "optimizer.lr_wsd_decay_samples", 160, context=WSD),
    Effect(
        "--lr-wsd-decay-samples 161",
        "optimizer.lr_wsd_decay_samples",
        161,
        context="--train-samples 800 --lr-decay-style WSD --lr-wsd-decay-samples 80",
        without="--train-iters",
    ),
    Effect("--hetero-plan b.json", "parallel.hetero_plan", Path("b.json"), **PLAN),
    Effect("--hetero-cluster c.yaml", "parallel.hetero_cluster", Path("c.yaml"), **PLAN),
    Effect("--hetero-profile a.json b.json", "parallel.planner.profiles", (Path("a.json"), Path("b.json")), **CLUSTER),
    Effect("--hetero-data-sheets", "parallel.planner.data_sheets", True, **CLUSTER),
    Effect("--hetero-plan-time-limit 5", "parallel.planner.time_limit_s", 5.0, **CLUSTER),
    Effect("--hetero-offload none", "parallel.planner.offload", "none", **CLUSTER),
    Effect("--hetero-host-memory-gib 64", "parallel.planner.host_memory_gib", 64, **CLUSTER),
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
    Effect(
        "--recompute-method uniform",
        "parallel.recompute_num_layers",
        None,
        context="--recompute-granularity full --recompute-num-layers 1",
    ),
    Effect("--use-distributed-optimizer", "parallel.use_distributed_optimizer", True),
    Effect("--optimizer-cpu-offload", "parallel.optimizer_cpu_offload", True, context="--use-distributed-optimizer"),
    Effect(
        "--optimizer-offload-fraction 0.5",
        "parallel.optimizer_offload_fraction",
        0.5,
        context="--use-distributed-optimizer --optimizer-cpu-offload",
    ),
    Effect("--cpu-offloading-num-layers 2", "parallel.cpu_offloading_num_layers", 2),
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
    Effect("--override-ckpt-iteration 7", "checkpoint.override_step", 7, context="--load out"),
    Effect("--override-ckpt-iteration 0", "checkpoint.override_step", 0, context="--load out"),
    Effect("--finetune", "checkpoint.finetune", True, context="--load out"),
    Effect("--hetero-elastic-copy-every 5", "checkpoint.copy_every", 5),
    Effect("--eval-iters 10", "run.eval_iters", 10),
    Effect("--eval-interval 20", "run.eval_interval", 20, context="--eval-iters 10"),
    Effect("--start-eval-at-iter 50", "run.start_eval_at_iter", 50, context="--eval-iters 10"),
    Effect("--eval-global-batch-size 4", "run.eval_global_batch_size", 4, context="--eval-iters 10"),
    Effect("--exit-interval 30", "run.exit_interval", 30),
    Effect("--exit-duration-in-mins 1.5", "run.exit_duration_minutes", 1.5),
    Effect("--no-overlap-grad-reduce", "parallel.overlap_grad_reduce", False),
    Effect("--overlap-grad-reduce", "parallel.overlap_grad_reduce", True, context="--no-overlap-grad-reduce"),
    Effect("--ddp-bucket-size 1000", "parallel.bucket_size", 1000),
    Effect("--distributed-backend nccl", "parallel.backend", "nccl"),
    Effect("--hetero-share-devices", "parallel.shares_devices", True, context="--distributed-backend nccl"),
    Effect("--distributed-timeout-minutes 0.5", "parallel.timeout_minutes", 0.5),
    Effect("--hetero-heartbeat-timeout 60", "parallel.heartbeat_timeout_s", 60.0),
    Effect("--train-iters 50", "run.train_iters", 50),
    Effect("--train-samples 400", "run.train_iters", 50, **SAMPLES),
    Effect("--train-samples 407", "run.train_iters", 50, **SAMPLES),
    Effect("--train-samples 407", "run.train_samples", 407, **SAMPLES),
    Effect(
        "--rampup-batch-size 2 2 30", "parallel.varying_batch", BatchRampup(start=2, increment=2, samples=30), **SAMPLES
    ),
    Effect("--rampup-batch-size 2 2 30", "run.train_iters", 105, **SAMPLES),
    Effect("--step-batch-size-schedule 0:2,1K:8", "parallel.varying_batch", SCHEDULE, **SCHEDULED),
    Effect("--step-batch-size-schedule 0:2,1e3:.8e1", "parallel.varying_batch", SCHEDULE, **SCHEDULED),
    Effect("--step-batch-size-schedule 0:2,1e3:.8e1", "run.train_iters", 113, **SCHEDULED),
    Effect("--step-batch-size-schedule 0:2,1K:8", "parallel.global_batch_size", 8, **SCHEDULED),
    Effect("--step-batch-size-schedule 0:2,1K:8", "run.train_iters", 113, **SCHEDULED),
    Effect("--seed 1", "run.seed", 1),
    Effect("--seed 1", "data.seed", 1),
    Effect("--no-check-for-nan-in-loss-and-grad", "run.check_for_nan", False),
    Effect(
        "--check-for-nan-in-loss-and-grad", "run.check_for_nan", True, context="--no-check-for-nan-in-loss-and-grad"
    ),
    Effect("--log-interval 1", "logging.log_interval", 1),
    Effect("--log-throughput", "logging.throughput", True),
    Effect("--log-memory-interval 5", "logging.memory_interval", 5),
    Effect("--hetero-stage-times-interval 5", "logging.stage_times_interval", 5),
    Effect("--hetero-slow-stage 2", "logging.slow_stage", 2.0, context="--hetero-stage-times-interval 5"),
    Effect("--hetero-profile a.json", "logging.profiles", (Path("a.json"),), context="--hetero-stage-times-interval 5"),
    Effect("--hetero-data-sheets", "logging.data_sheets", True, context="--hetero-stage-times-interval 5"),
    Effect("--no-progress", "logging.progress", False),
    Effect("--tensorboard-dir logs", "scalars.tensorboard_dir", Path("logs")),
    Effect("--tensorboard-log-interval 5", "scalars.interval", 5, **EVENTS),
    Effect("--tensorboard-queue-size 5", "scalars.queue_size", 5, **EVENTS),
    Effect("--wandb-project p", "scalars.wandb_project", "p"),
    Effect("--wandb-entity e", "scalars.wandb_entity", "e", **WANDB),
    Effect("--wandb-exp-name n", "scalars.wandb_exp_name", "n", **WANDB),
    Effect("--wandb-save-dir d", "scalars.wandb_save_dir", Path("d"), **WANDB),
    Effect("--hetero-metrics-port 9400", "scalars.port", 9400),
    Effect("--hetero-metrics-host 0.0.0.0", "scalars.host", "0.0.0.0", context="--hetero-metrics-port 9400"),
    Effect("--log-timers-to-tensorboard", "scalars.timers", True, **EVENTS),
    Effect("--log-validation-ppl-to-tensorboard", "scalars.validation_ppl", True, **EVENTS),
    Effect("--log-world-size-to-tensorboard", "scalars.world_size", True, **EVENTS),
    Effect("--log-batch-size-to-tensorboard", "scalars.batch_size", True, **EVENTS),
    Effect("--log-memory-to-tensorboard", "scalars.memory", True, **EVENTS),
    Effect("--no-log-learning-rate-to-tensorboard", "scalars.learning_rate", False, **EVENTS),
    Effect("--no-log-learnig-rate-to-tensorboard", "scalars.learning_rate", False, **EVENTS),
    Effect("--no-log-loss-scale-to-tensorboard", "scalars.loss_scale", False, **EVENTS),
    Effect("--disable-log-loss-scale-to-tensorboard", "scalars.loss_scale", False, **EVENTS),
    Effect("--profile", "profiler.enabled", True),
    Effect("--profile-step-start 3", "profiler.start_step", 3, context="--profile"),
    Effect("--profile-step-end 20", "profiler.end_step", 20, context="--profile"),
    Effect("--profile-ranks 1 3", "profiler.ranks", (1, 3), context="--profile"),
    Effect("--use-pytorch-profiler", "profiler.torch", True, context="--profile --tensorboard-dir logs"),
    Effect("--nvtx-ranges", "profiler.nvtx_ranges", True, context="--profile"),
    Effect("--pytorch-profiler-collect-shapes", "profiler.shapes", True, **TORCH_PROFILER),
    Effect("--pytorch-profiler-collect-callstack", "profiler.callstack", True, **TORCH_PROFILER),
]

SINGLE_VALUES = {
    "--optimizer": ("adam", "sgd"),
    "--context-parallel-size": ("1", "2"),
    "--cross-entropy-fusion-impl": ("native", "te"),
    "--dataloader-type": ("single", "cyclic"),
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
    tested = {effect.flag.split()[0] for effect in EFFECTS} | set(SINGLE_VALUES) | {"--yaml-cfg"}
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
        ("optimizer.lr_decay_samples", None),
        ("optimizer.lr_warmup_samples", 0),
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
        ("logging.log_interval", 100),
        ("logging.progress", True),
        ("stage.attention_dropout", 0.1),
        ("stage.hidden_dropout", 0.1),
        ("stage.init_method_std", 0.02),
        ("stage.transformer_impl", "auto"),
        ("stage.attention_backend", "auto"),
        ("stage.fp8_format", None),
        ("stage.fp8_recipe", "delayed"),
        ("stage.moe_router_load_balancing", "none"),
    ],
)
def test_default(path: str, value: Any) -> None:
    assert operator.attrgetter(path)(parse()) == value


def test_flags_with_a_stated_backend_need_no_torch() -> None:
    program = (
        "import sys; from megatron.pretrain.cli.arguments import parse_args; parse_args(sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", program, *command()], cwd=root, check=True, timeout=60)
