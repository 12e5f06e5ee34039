"""Which flags go together: what is required, what excludes what, and what has an effect only beside another.

A flag that would change nothing is refused like a contradiction: its user expects an effect.
"""

from collections.abc import Callable
from pathlib import Path

from hetero.errors import ConfigError
from megatron.training.flags import FlagValues

_REQUIRED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--max-position-embeddings",
    "--seq-length",
    "--tokenizer-type",
    "--global-batch-size",
    "--lr",
)

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


def has_samples(flags: FlagValues) -> bool:
    return flags["--train-samples"] is not None


def has_experts(flags: FlagValues) -> bool:
    return flags["--num-experts"] is not None


def is_rope(flags: FlagValues) -> bool:
    return flags["--use-rotary-position-embeddings"] is True or flags["--position-embedding-type"] == "rope"


def is_auto(flags: FlagValues) -> bool:
    return flags["--hetero-plan"] == Path("auto")


def emulates(flags: FlagValues) -> bool:
    return flags["--hetero-emulate"] is not None


def cluster_of(flags: FlagValues) -> Path | None:
    """The cluster file, of real or of emulated devices."""
    path: Path | None = flags["--hetero-emulate"] if emulates(flags) else flags["--hetero-cluster"]
    return path


def has_plan_file(flags: FlagValues) -> bool:
    return flags["--hetero-plan"] is not None and not is_auto(flags)


def plans_at_start(flags: FlagValues) -> bool:
    return cluster_of(flags) is not None and not has_plan_file(flags)


def is_wsd(flags: FlagValues) -> bool:
    return bool(flags["--lr-decay-style"] == "WSD")


_COUNTS = ("--lr-decay", "--lr-warmup", "--lr-wsd-decay")
"""Lengths that have a flag in steps (``-iters``) and one in samples."""

_NEEDS: tuple[tuple[tuple[str, ...], Callable[[FlagValues], bool], str], ...] = (
    (("--num-query-groups",), lambda flags: flags["--group-query-attention"], "--group-query-attention"),
    (
        ("--rotary-base", "--rotary-percent", "--rotary-seq-len-interpolation-factor", "--use-rope-scaling"),
        is_rope,
        "--position-embedding-type rope",
    ),
    (
        (
            "--rope-scaling-factor",
            "--hetero-rope-low-freq-factor",
            "--hetero-rope-high-freq-factor",
            "--hetero-rope-original-max-positions",
        ),
        lambda flags: flags["--use-rope-scaling"],
        "--use-rope-scaling",
    ),
    (("--hetero-add-proj-bias",), lambda flags: flags["--disable-bias-linear"], "--disable-bias-linear"),
    (
        ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"),
        has_experts,
        "--num-experts",
    ),
    (
        ("--moe-aux-loss-coeff",),
        lambda flags: flags["--moe-router-load-balancing-type"] == "aux_loss",
        "--moe-router-load-balancing-type aux_loss",
    ),
    (("--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"), is_wsd, "--lr-decay-style WSD"),
    (
        ("--start-weight-decay", "--end-weight-decay"),
        lambda flags: flags["--weight-decay-incr-style"] != "constant",
        "--weight-decay-incr-style linear or cosine",
    ),
    (
        ("--weight-decay",),
        lambda flags: flags["--weight-decay-incr-style"] == "constant",
        "--weight-decay-incr-style constant",
    ),
    (("--valid-data-path", "--test-data-path"), lambda flags: flags["--train-data-path"] != (), "--train-data-path"),
    (("--hetero-plan-time-limit", "--hetero-plan-out"), plans_at_start, "a cluster and no plan file"),
    (
        ("--hetero-profile", "--hetero-data-sheets"),
        lambda flags: plans_at_start(flags) or emulates(flags),
        "--hetero-emulate, or --hetero-cluster and no plan file",
    ),
    (("--hetero-emulate-time-scale", "--hetero-emulate-seq-length"), emulates, "--hetero-emulate"),
    (
        ("--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"),
        lambda flags: flags["--fp16"],
        "--fp16",
    ),
    (
        ("--recompute-num-layers",),
        lambda flags: flags["--recompute-granularity"] == "full",
        "--recompute-granularity full",
    ),
    (
        ("--overlap-param-gather",),
        lambda flags: flags["--use-distributed-optimizer"] or has_plan_file(flags),
        "--use-distributed-optimizer",
    ),
    (("--save-interval", "--async-save", "--hetero-keep-last"), lambda flags: flags["--save"] is not None, "--save"),
    (("--ckpt-step", "--finetune"), lambda flags: flags["--load"] is not None, "--load"),
    (("--eval-interval",), lambda flags: flags["--eval-iters"] > 0, "--eval-iters above 0"),
    (("--split",), lambda flags: flags["--data-path"] != (), "--data-path"),
    (("--data-cache-path",), lambda flags: not flags["--mock-data"], "--data-path or --train-data-path"),
)
"""Flags, what must hold for them to have an effect, and the flag that makes it hold."""


def check_nothing_is_missing(flags: FlagValues) -> None:
    missing = [name for name in _REQUIRED if name not in flags.given]
    if not flags.given & {"--micro-batch-size", "--hetero-plan", "--hetero-cluster", "--hetero-emulate"}:
        missing.append("--micro-batch-size (or --hetero-plan, --hetero-cluster or --hetero-emulate)")
    if not flags.given & {"--train-iters", "--train-samples"}:
        missing.append("--train-iters (or --train-samples)")
    if not flags.given & {"--data-path", "--train-data-path", "--mock-data"}:
        missing.append("--data-path (or --train-data-path, or --mock-data)")
    if missing:
        raise ConfigError(f"required and missing: {', '.join(missing)}")


def check_flags_go_together(flags: FlagValues) -> None:
    for first, second in _EXCLUSIVE:
        if {first, second} <= flags.given:
            raise ConfigError(f"{flags.shown(first)} and {flags.shown(second)} exclude each other: leave one out")
    _check_plan_flags(flags)
    _check_counts_have_one_unit(flags)
    for names, holds, fix in _NEEDS:
        for name in names:
            if name in flags.given and not holds(flags):
                raise ConfigError(f"{flags.shown(name)} has no effect without {fix}: add that, or leave {name} out")


def _check_plan_flags(flags: FlagValues) -> None:
    if is_auto(flags) and cluster_of(flags) is None:
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
    length, unit, other = ("--train-iters", "iters", "samples")
    if has_samples(flags):
        length, unit, other = ("--train-samples", "samples", "iters")
    for count in _COUNTS:
        if f"{count}-{other}" in flags.given:
            raise ConfigError(
                f"{flags.shown(f'{count}-{other}')} beside {flags.shown(length)}: use {count}-{unit} with {length}"
            )
