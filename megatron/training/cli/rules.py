"""Checks which flags go together: what is required, excludes another, has an effect only beside another, or must fit.

A flag that would change nothing is refused like a contradiction: its user expects an effect.
"""

from collections.abc import Callable
from typing import NamedTuple

from hetero.errors import ConfigError
from megatron.training.cli.config import FLAGS
from megatron.training.cli.derived import (
    cluster_file,
    emulates,
    ffn_hidden_size,
    has_experts,
    has_plan_file,
    has_samples,
    is_auto,
    is_rope,
    is_wsd,
    kv_channels,
    lr_decay_iters,
    lr_warmup_iters,
    lr_wsd_decay_iters,
    plans_at_start,
    train_iters,
)
from megatron.training.cli.fields import FlagValues

_STATED_BY_THE_PLAN = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--micro-batch-size",
    "--sequence-parallel",
    "--recompute-granularity",
    "--recompute-num-layers",
    "--hetero-schedule",
)

_EXCLUSIVE = (
    ("--train-iters", "--train-samples"),
    ("--lr-warmup-iters", "--lr-warmup-fraction"),
    ("--lr-warmup-samples", "--lr-warmup-fraction"),
    ("--mock-data", "--data-path"),
    ("--mock-data", "--train-data-path"),
    ("--data-path", "--train-data-path"),
    ("--data-path", "--valid-data-path"),
    ("--data-path", "--test-data-path"),
    ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
    ("--bf16", "--fp16"),
    ("--rotary-seq-len-interpolation-factor", "--use-rope-scaling"),
    ("--hetero-cluster", "--hetero-emulate"),
    ("--loss-scale", "--initial-loss-scale"),
    ("--loss-scale", "--min-loss-scale"),
    ("--loss-scale", "--loss-scale-window"),
    ("--loss-scale", "--hysteresis"),
)

_COUNTS = (
    ("--lr-decay-iters", "--lr-decay-samples"),
    ("--lr-warmup-iters", "--lr-warmup-samples"),
    ("--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
)
"""Lengths that have a flag in steps and one in samples."""


class _Condition(NamedTuple):
    """Says what must hold for a flag to have an effect, and what the user adds to make it hold."""

    holds: Callable[[FlagValues], bool]
    fix: str


def _on(name: str) -> _Condition:
    """The flag is given: a switch, a path, or paths."""
    return _Condition(lambda flags: bool(flags[name]), name)


def _equal(name: str, value: str) -> _Condition:
    return _Condition(lambda flags: bool(flags[name] == value), f"{name} {value}")


_NEEDS: tuple[tuple[_Condition, tuple[str, ...]], ...] = (
    (_on("--group-query-attention"), ("--num-query-groups",)),
    (
        _Condition(is_rope, "--position-embedding-type rope"),
        ("--rotary-base", "--rotary-percent", "--rotary-seq-len-interpolation-factor", "--use-rope-scaling"),
    ),
    (
        _on("--use-rope-scaling"),
        (
            "--rope-scaling-factor",
            "--hetero-rope-low-freq-factor",
            "--hetero-rope-high-freq-factor",
            "--hetero-rope-original-max-positions",
        ),
    ),
    (_on("--disable-bias-linear"), ("--hetero-add-proj-bias",)),
    (
        _on("--num-experts"),
        ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"),
    ),
    (_equal("--moe-router-load-balancing-type", "aux_loss"), ("--moe-aux-loss-coeff",)),
    (
        _equal("--lr-decay-style", "WSD"),
        ("--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
    ),
    (
        _Condition(
            lambda flags: flags["--weight-decay-incr-style"] != "constant", "--weight-decay-incr-style linear or cosine"
        ),
        ("--start-weight-decay", "--end-weight-decay"),
    ),
    (_equal("--weight-decay-incr-style", "constant"), ("--weight-decay",)),
    (_on("--train-data-path"), ("--valid-data-path", "--test-data-path")),
    (_Condition(plans_at_start, "a cluster and no plan file"), ("--hetero-plan-time-limit", "--hetero-plan-out")),
    (
        _Condition(
            lambda flags: plans_at_start(flags) or emulates(flags),
            "--hetero-emulate, or --hetero-cluster and no plan file",
        ),
        ("--hetero-profile", "--hetero-data-sheets"),
    ),
    (_on("--hetero-emulate"), ("--hetero-emulate-time-scale", "--hetero-emulate-seq-length")),
    (
        _on("--fp16"),
        ("--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"),
    ),
    (_on("--cross-entropy-loss-fusion"), ("--cross-entropy-fusion-impl",)),
    (_Condition(lambda flags: flags["--bf16"] or has_plan_file(flags), "--bf16"), ("--fp8-format",)),
    (_Condition(lambda flags: flags["--fp8-format"] or has_plan_file(flags), "--fp8-format"), ("--fp8-recipe",)),
    (_equal("--recompute-granularity", "full"), ("--recompute-num-layers",)),
    (
        _Condition(
            lambda flags: flags["--use-distributed-optimizer"] or has_plan_file(flags), "--use-distributed-optimizer"
        ),
        ("--overlap-param-gather",),
    ),
    (_on("--save"), ("--save-interval", "--async-save", "--hetero-keep-last")),
    (_on("--load"), ("--ckpt-step", "--finetune")),
    (_Condition(lambda flags: flags["--eval-iters"] > 0, "--eval-iters above 0"), ("--eval-interval",)),
    (_on("--data-path"), ("--split",)),
    (
        _Condition(lambda flags: not flags["--mock-data"], "--data-path or --train-data-path"),
        ("--data-cache-path",),
    ),
)
"""Conditions, and the flags that have an effect only where they hold."""


def check_flags(flags: FlagValues) -> None:
    """Check what the values of single flags cannot tell.

    Raises:
        ConfigError: something is missing, has no effect, contradicts another flag, or does not fit its value.
    """
    _check_nothing_is_missing(flags)
    _check_flags_go_together(flags)
    for check in _VALUES_FIT:
        check(flags)


def _check_nothing_is_missing(flags: FlagValues) -> None:
    missing = [flag.name for flag in FLAGS if flag.required and flag.name not in flags.given]
    if not flags.given & {"--micro-batch-size", "--hetero-plan", "--hetero-cluster", "--hetero-emulate"}:
        missing.append("--micro-batch-size (or --hetero-plan, --hetero-cluster or --hetero-emulate)")
    if not flags.given & {"--train-iters", "--train-samples"}:
        missing.append("--train-iters (or --train-samples)")
    if not flags.given & {"--data-path", "--train-data-path", "--mock-data"}:
        missing.append("--data-path (or --train-data-path, or --mock-data)")
    if missing:
        raise ConfigError(f"required and missing: {', '.join(missing)}")


def _check_flags_go_together(flags: FlagValues) -> None:
    for first, second in _EXCLUSIVE:
        if {first, second} <= flags.given:
            raise ConfigError(f"{flags.shown(first)} and {flags.shown(second)} exclude each other: leave one out")
    _check_plan_flags(flags)
    _check_counts_have_one_unit(flags)
    for condition, names in _NEEDS:
        for name in names:
            if name in flags.given and not condition.holds(flags):
                raise ConfigError(
                    f"{flags.shown(name)} has no effect without {condition.fix}: add that, or leave {name} out"
                )


def _check_plan_flags(flags: FlagValues) -> None:
    if is_auto(flags) and cluster_file(flags) is None:
        raise ConfigError(
            "--hetero-plan auto: plans for a cluster, so add --hetero-cluster CLUSTER.yaml, or emulate it"
        )
    if emulates(flags) and flags["--distributed-backend"] == "nccl":
        raise ConfigError("--distributed-backend nccl beside --hetero-emulate: the CPU computes; leave the backend out")
    if plans_at_start(flags) and flags["--hetero-plan-time-limit"] >= 60 * flags["--distributed-timeout-minutes"]:
        raise ConfigError(
            f"{flags.shown('--hetero-plan-time-limit')} (seconds): the other ranks wait for the plan no longer than "
            f"{flags.shown('--distributed-timeout-minutes')}; lower the first or raise the second"
        )
    for source in ("--hetero-plan", "--hetero-cluster", "--hetero-emulate"):
        for name in _STATED_BY_THE_PLAN:
            if flags[source] is not None and name in flags.given:
                raise ConfigError(
                    f"{flags.shown(name)} beside {flags.shown(source)}: the plan states it for each stage; "
                    f"leave {name} out, or change the plan"
                )


def _check_counts_have_one_unit(flags: FlagValues) -> None:
    for iters, samples in _COUNTS:
        length, right, wrong = ("--train-iters", iters, samples)
        if has_samples(flags):
            length, right, wrong = ("--train-samples", samples, iters)
        if wrong in flags.given:
            raise ConfigError(f"{flags.shown(wrong)} beside {flags.shown(length)}: use {right} with {length}")


def _check_samples_are_whole_steps(flags: FlagValues, *names: str) -> None:
    for samples in names:
        batch: int = flags["--global-batch-size"]
        steps, rest = divmod(flags[samples] or 0, batch)
        if rest:
            raise ConfigError(
                f"{flags.shown(samples)} is no multiple of {flags.shown('--global-batch-size')}: "
                f"round it, for instance to {(steps + 1) * batch}"
            )


def _check_train_samples(flags: FlagValues) -> None:
    _check_samples_are_whole_steps(flags, "--train-samples")


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


def _check_ffn(flags: FlagValues) -> None:
    if ffn_hidden_size(flags) == 0:
        raise ConfigError(
            f"{flags.shown('--hidden-size')} with --swiglu: two thirds of {4 * flags['--hidden-size']}, rounded down "
            "to a multiple of 64, is 0; give --ffn-hidden-size"
        )


def _check_heads(flags: FlagValues) -> None:
    heads: int = flags["--num-attention-heads"]
    if flags["--group-query-attention"] and heads % flags["--num-query-groups"]:
        raise ConfigError(f"{flags.shown('--num-query-groups')} does not divide {flags.shown('--num-attention-heads')}")
    if flags["--kv-channels"] is None and flags["--hidden-size"] % heads:
        raise ConfigError(
            f"{flags.shown('--num-attention-heads')} does not divide {flags.shown('--hidden-size')}: "
            "change one, or give --kv-channels"
        )
    size = kv_channels(flags)
    rotated = int(size * flags["--rotary-percent"])
    if is_rope(flags) and (rotated < 2 or rotated % 2):
        raise ConfigError(
            f"{flags.shown('--rotary-percent')} of heads of size {size} rotates {rotated} channels: "
            "channels rotate in pairs, so change --rotary-percent or --kv-channels"
        )


def _check_positions(flags: FlagValues) -> None:
    if flags["--max-position-embeddings"] < flags["--seq-length"]:
        raise ConfigError(
            f"{flags.shown('--max-position-embeddings')} is below {flags.shown('--seq-length')}: raise it to that"
        )
    contradiction = flags["--position-embedding-type"] != "rope" and "--position-embedding-type" in flags.given
    if flags["--use-rotary-position-embeddings"] and contradiction:
        raise ConfigError(
            f"{flags.shown('--position-embedding-type')} and --use-rotary-position-embeddings exclude each other: "
            "leave one out"
        )
    low, high = "--hetero-rope-low-freq-factor", "--hetero-rope-high-freq-factor"
    if flags["--use-rope-scaling"] and flags[low] >= flags[high]:
        raise ConfigError(f"{flags.shown(low)} is not below {flags.shown(high)}: lower the first or raise the second")


def _check_tokenizer(flags: FlagValues) -> None:
    name, model = flags["--tokenizer-type"], flags["--tokenizer-model"]
    if name == "HuggingFaceTokenizer" and model is None:
        raise ConfigError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: a tokenizer.json or the folder that has it"
        )
    if name != "HuggingFaceTokenizer" and model is not None:
        raise ConfigError(f"--tokenizer-model {model} has no effect: --tokenizer-type {name} reads no file")
    if name == "NullTokenizer" and flags["--vocab-size"] is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size: it has no vocabulary of its own")


def _check_learning_rates(flags: FlagValues) -> None:
    for name in ("--min-lr", "--lr-warmup-init"):
        if flags[name] > flags["--lr"]:
            raise ConfigError(f"{flags.shown(name)} is above {flags.shown('--lr')}: lower it, or raise --lr")


def _check_phases(flags: FlagValues) -> None:
    """Warmup, then decay, and WSD's last steps between them and the end of the decay."""
    _check_samples_are_whole_steps(flags, *(samples for _, samples in _COUNTS))
    decay_iters, warmup_iters = lr_decay_iters(flags) or train_iters(flags), lr_warmup_iters(flags)
    wsd_decay_iters = lr_wsd_decay_iters(flags)
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


def _check_weight_decay(flags: FlagValues) -> None:
    if flags["--weight-decay-incr-style"] == "constant":
        return
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


def _check_batches(flags: FlagValues) -> None:
    micro: int | None = flags["--micro-batch-size"]
    if micro is not None and flags["--global-batch-size"] % micro:
        raise ConfigError(
            f"{flags.shown('--global-batch-size')} is no multiple of {flags.shown('--micro-batch-size')}: change one"
        )


def _check_virtual_stages(flags: FlagValues) -> None:
    given, pp = flags["--num-layers-per-virtual-pipeline-stage"], flags["--pipeline-model-parallel-size"]
    if given is not None and flags["--num-layers"] % (given * pp):
        raise ConfigError(
            f"{flags.shown('--num-layers-per-virtual-pipeline-stage')} x --pipeline-model-parallel-size {pp} does not "
            f"divide {flags.shown('--num-layers')}: change one, or give an uneven plan with --hetero-plan"
        )


def _check_loss_scale(flags: FlagValues) -> None:
    if flags["--min-loss-scale"] > flags["--initial-loss-scale"]:
        raise ConfigError(f"{flags.shown('--min-loss-scale')} is above {flags.shown('--initial-loss-scale')}: lower it")


_VALUES_FIT: tuple[Callable[[FlagValues], None], ...] = (
    _check_train_samples,
    _check_experts,
    _check_ffn,
    _check_heads,
    _check_positions,
    _check_tokenizer,
    _check_learning_rates,
    _check_phases,
    _check_weight_decay,
    _check_batches,
    _check_virtual_stages,
    _check_loss_scale,
)
"""Values that must fit one another, in the order in which they are told: of several wrong ones, the first."""
