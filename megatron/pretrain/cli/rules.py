"""Checks which flags go together: what is required, excludes another, has an effect only beside another, or must fit.

A flag that would change nothing is refused like a contradiction: its user expects an effect, unless a table says that
scripts carry it along. What a flag excludes and needs stands at its declaration. All violations are told, in the order
of the declarations.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from megatron.pretrain.cli.config import FLAGS
from megatron.pretrain.cli.derived import (
    batch_schedule,
    batch_sizes,
    cluster_file,
    emulates,
    ffn_hidden_size,
    has_experts,
    has_samples,
    is_auto,
    is_rope,
    is_wsd,
    kv_channels,
    plans_at_start,
    tokenizer_type,
)
from megatron.pretrain.cli.fields import Condition, Flag, FlagValues, UnreadableFlagError
from megatron.pretrain.cli.value_types import TOKENIZER_FILES, missing_tokenizer_file
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT

_IN_STEPS_AND_SAMPLES = tuple((flag.relations.in_steps, flag.name) for flag in FLAGS if flag.relations.in_steps)
"""Lengths that have a flag in steps and one in samples."""

_ALTERNATIVES = (
    ("--micro-batch-size", "--hetero-plan", "--hetero-cluster", "--hetero-emulate"),
    ("--global-batch-size", "--step-batch-size-schedule"),
    ("--train-iters", "--train-samples"),
    ("--data-path", "--train-data-path", "--mock-data"),
    ("--tokenizer-type", "--vocab-file"),
)
"""Of each row, one flag is required."""


def check_flags(flags: FlagValues) -> tuple[list[str], dict[str, str]]:
    """Check what the values of single flags cannot tell.

    Returns:
        What is missing, has no effect, contradicts another flag, or does not fit its value, all of it, in the words of
        an error; and which flags have no effect and may be given all the same, each with the reason.
    """
    problems = []
    if missing := _missing(flags):
        problems.append(
            f"required and missing: {', '.join(missing.values())}; add {'it' if len(missing) == 1 else 'them'}"
        )
    flags = dataclasses.replace(flags, unreadable=flags.unreadable.union(missing, *map(_others, missing)))
    effective = [flag for flag in FLAGS if flag.name in flags.given and _has_effect(flag, flags)]
    flags = dataclasses.replace(flags, effective=frozenset(flag.name for flag in effective))
    notes = dict(flags.notes)
    checks: tuple[_Check, ...] = (
        *(partial(_excluded, flag) for flag in effective),
        _check_plan_flags,
        *(partial(_in_wrong_unit, iters, samples) for iters, samples in _IN_STEPS_AND_SAMPLES),
        *(partial(_unmet, flag, condition, notes) for flag in effective for condition in flag.relations.needs),
        *(partial(_harmful, name) for name in flags.notes),
        *_VALUES_FIT,
    )
    for check in checks:
        problems += _judged(check, flags)
    return problems, notes


def _has_effect(flag: Flag, flags: FlagValues) -> bool:
    """Whether the value of a flag that is given may change anything.

    The default does not, as Megatron-LM's parser cannot tell it from a flag that was left out.
    """
    try:
        idle = flag.relations.idle
        return bool(flags[flag.name] != flag.default) and not (idle is not None and idle(flags))
    except UnreadableFlagError:
        return True


_Check = Callable[[FlagValues], Iterable[str]]
"""Yields what is wrong, in the words of an error."""


def _judged(check: _Check, flags: FlagValues) -> list[str]:
    """What a check finds, as far as the flags that it asks for have values: that some have none is told already."""
    found: list[str] = []
    with contextlib.suppress(UnreadableFlagError):
        # One by one: what was found before a flag turns out to have no value stays.
        for problem in check(flags):
            found += [problem]
    return found


def _missing(flags: FlagValues) -> dict[str, str]:
    """The flags that are required and not given, each as a message shows it."""
    missing = {flag.name: flag.name for flag in FLAGS if flag.required and flag.name not in flags.given}
    for wanted, *others in _ALTERNATIVES:
        if not flags.given & {wanted, *others}:
            *first, last = others
            missing[wanted] = f"{wanted} (or {', '.join(first)}{' or ' if first else ''}{last})"
    return missing


def _others(name: str) -> tuple[str, ...]:
    """The flags that could have been given in place of ``name``: they have no value either."""
    return next((names for names in _ALTERNATIVES if names[0] == name), ())


def _excluded(flag: Flag, flags: FlagValues) -> Iterator[str]:
    for other in flag.relations.excludes:
        if other in flags.effective:
            yield f"{flags.shown(flag.name)} and {flags.shown(other)} exclude each other: leave one out"


def _check_plan_flags(flags: FlagValues) -> Iterator[str]:
    if is_auto(flags) and cluster_file(flags) is None:
        yield "--hetero-plan auto: plans for a cluster, so add --hetero-cluster CLUSTER.yaml, or emulate it"
    if emulates(flags) and flags["--distributed-backend"] == "nccl":
        yield "--distributed-backend nccl beside --hetero-emulate: the CPU computes; leave the backend out"
    if plans_at_start(flags) and flags["--hetero-plan-time-limit"] >= 60 * flags["--distributed-timeout-minutes"]:
        yield (
            f"{flags.shown('--hetero-plan-time-limit')} (seconds): the other ranks wait for the plan no longer than "
            f"{flags.shown('--distributed-timeout-minutes')}; lower the first or raise the second"
        )
    source = next((name for name in _PLAN_SOURCES if flags[name] is not None), None)
    for flag in FLAGS:
        if source is not None and flag.relations.stated_by_plan and flag.name in flags.given:
            yield (
                f"{flags.shown(flag.name)} beside {flags.shown(source)}: the plan states it for each stage; "
                f"leave {flag.name} out, or change the plan"
            )


_PLAN_SOURCES = ("--hetero-plan", "--hetero-cluster", "--hetero-emulate")
"""Flags that name a plan or what to plan for; the first that is given is told."""


def _in_wrong_unit(iters: str, samples: str, flags: FlagValues) -> Iterator[str]:
    length, right, wrong = ("--train-iters", iters, samples)
    if has_samples(flags):
        length, right, wrong = ("--train-samples", samples, iters)
    elif flags["--rampup-batch-size"] is not None or flags["--step-batch-size-schedule"] is not None:
        return  # the run has to count samples: _steps_of_varying_batch
    if wrong in flags.effective:
        yield f"{flags.shown(wrong)} beside {flags.shown(length)}: use {right} with {length}"


def _unmet(flag: Flag, condition: Condition, notes: dict[str, str], flags: FlagValues) -> Iterator[str]:
    """Tell that a flag needs another, or put into ``notes`` that it has no effect and may stand there all the same."""
    if condition.holds(flags) or condition.is_switched_off(flags):
        return
    if condition.note:
        notes[flag.name] = condition.note
    elif flag.name in flags.from_file:
        notes[flag.name] = f"it needs {condition.fix}"
    else:
        yield (f"{flags.shown(flag.name)} has no effect without {condition.fix}: add that, or leave {flag.name} out")


def _harmful(name: str, flags: FlagValues) -> Iterator[str]:
    """Tell that a flag, which has no effect in most models, would have one in this."""
    needs = WITHOUT_EFFECT[name].needs if name in WITHOUT_EFFECT else None
    if needs is not None and not needs.holds(flags):
        yield f"{name} is not supported without {needs.fix}: add that, or leave {name} out"


def _check_train_samples(flags: FlagValues) -> Iterator[str]:
    if batch_schedule(flags) is not None:
        return
    first = "--rampup-batch-size" if flags["--rampup-batch-size"] is not None else "--global-batch-size"
    size: int = flags[first][0] if first == "--rampup-batch-size" else flags[first]
    if has_samples(flags) and flags["--train-samples"] < size:
        yield (
            f"{flags.shown('--train-samples')} are fewer than one step's {flags.shown(first)}: raise the first or "
            "lower the second"
        )


def _check_rampup(flags: FlagValues) -> Iterator[str]:
    name = "--rampup-batch-size"
    if (values := flags[name]) is None:
        return
    shown = flags.shown(name)
    if len(values) != _RAMPUP_VALUES:
        yield f"{shown}: {len(values)} numbers, must be {_RAMPUP_VALUES}: START INCREMENT SAMPLES"
        return
    if batch_schedule(flags) is not None:
        return
    start, increment, _ = values
    grows = flags["--global-batch-size"] - start
    if grows <= 0:
        yield (
            f"{shown} begins with {start} samples, must be fewer than {flags.shown('--global-batch-size')}: lower the "
            f"first number, or leave {name} out"
        )
    elif grows % increment:
        yield (
            f"{shown} never reaches {flags.shown('--global-batch-size')}: its increment {increment} does not divide "
            f"the {grows} samples from {start} on; change one of the three"
        )
    elif grows // increment > _MOST_INCREMENTS:
        yield (
            f"{shown}: {grows // increment} increments up to {flags.shown('--global-batch-size')}, at most "
            f"{_MOST_INCREMENTS} are; raise the second number"
        )
    elif not has_samples(flags):
        yield _steps_of_varying_batch(shown, flags)


def _steps_of_varying_batch(shown: str, flags: FlagValues) -> str:
    """Refuse a length in steps, as Megatron-LM does for a ramp-up: it does not say over how much data."""
    sizes = batch_sizes(flags)
    lengths = [
        f"{samples} {sizes.first_sample(flags[iters])}"
        for iters, samples in (("--train-iters", "--train-samples"), *_IN_STEPS_AND_SAMPLES)
        if iters in flags.effective
    ]
    return f"{shown} needs the length of the run in samples: in place of steps give {' '.join(lengths)}"


def _check_batch_schedule(flags: FlagValues) -> Iterator[str]:
    if (schedule := batch_schedule(flags)) is None:
        return
    shown, changes = flags.shown(schedule.flag), schedule.changes(schedule.largest)
    if changes[0].first_sample > 0:
        yield (
            f"{shown}: begins at {schedule.entries[0][0]} tokens, sample {changes[0].first_sample}, must begin at 0; "
            "add the size of the first steps as 0:SAMPLES"
        )
        return
    for (tokens, _), (change, later) in zip(schedule.entries[1:], itertools.pairwise(changes), strict=True):
        if change.first_sample == later.first_sample:
            yield (
                f"{shown}: two sizes begin at sample {later.first_sample}, the second at {tokens} tokens: entries are "
                f"at least {flags.shown('--seq-length')} apart; leave one out"
            )
            return
    if not has_samples(flags):
        yield _steps_of_varying_batch(shown, flags)


_RAMPUP_VALUES = 3

_MOST_INCREMENTS = 1024
"""Of a ramp-up; each has a plan of its own, which is looked at before the first step. A heuristic."""


def _check_experts(flags: FlagValues) -> Iterator[str]:
    if not has_experts(flags):
        return
    if not flags["--disable-bias-linear"]:
        yield (f"{flags.shown('--num-experts')}: the experts here have no biases, add --disable-bias-linear")
    if flags["--moe-router-topk"] > flags["--num-experts"]:
        yield (
            f"{flags.shown('--moe-router-topk')} exceeds {flags.shown('--num-experts')}: "
            "a token visits each expert at most once"
        )


def _check_ffn(flags: FlagValues) -> Iterator[str]:
    if ffn_hidden_size(flags) == 0:
        yield (
            f"{flags.shown('--hidden-size')} with --swiglu: two thirds of {4 * flags['--hidden-size']}, rounded down "
            "to a multiple of 64, is 0; give --ffn-hidden-size"
        )


def _check_heads(flags: FlagValues) -> Iterator[str]:
    heads: int = flags["--num-attention-heads"]
    if flags["--group-query-attention"] and heads % flags["--num-query-groups"]:
        yield (f"{flags.shown('--num-query-groups')} does not divide {flags.shown('--num-attention-heads')}")
    if flags["--kv-channels"] is None and flags["--hidden-size"] % heads:
        yield (
            f"{flags.shown('--num-attention-heads')} does not divide {flags.shown('--hidden-size')}: "
            "change one, or give --kv-channels"
        )
        return
    size = kv_channels(flags)
    rotated = int(size * flags["--rotary-percent"])
    if is_rope(flags) and (rotated < 2 or rotated % 2):
        yield (
            f"{flags.shown('--rotary-percent')} of heads of size {size} rotates {rotated} channels: "
            "channels rotate in pairs, so change --rotary-percent or --kv-channels"
        )


def _check_positions(flags: FlagValues) -> Iterator[str]:
    if flags["--max-position-embeddings"] < flags["--seq-length"]:
        yield (f"{flags.shown('--max-position-embeddings')} is below {flags.shown('--seq-length')}: raise it to that")
    contradiction = flags["--position-embedding-type"] != "rope" and "--position-embedding-type" in flags.given
    if flags["--use-rotary-position-embeddings"] and contradiction:
        yield (
            f"{flags.shown('--position-embedding-type')} and --use-rotary-position-embeddings exclude each other: "
            "leave one out"
        )
    low, high = "--hetero-rope-low-freq-factor", "--hetero-rope-high-freq-factor"
    if flags["--use-rope-scaling"] and flags[low] >= flags[high]:
        yield (f"{flags.shown(low)} is not below {flags.shown(high)}: lower the first or raise the second")


def _check_tokenizer(flags: FlagValues) -> Iterator[str]:
    name = tokenizer_type(flags)
    wanted = TOKENIZER_FILES.get(name, {})
    for file in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        if file in wanted and flags[file] is None:
            yield missing_tokenizer_file(name, file)
        if file not in wanted and flags[file] is not None:
            reads = " and ".join(wanted) or "no file"
            yield f"{flags.shown(file)} has no effect: --tokenizer-type {name} reads {reads}"
    if name != "NullTokenizer":
        return
    size, eod = flags["--vocab-size"], flags["--null-tokenizer-eod-id"]
    if size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size: it has no vocabulary of its own"
    elif eod is not None and eod >= size:
        yield f"{flags.shown('--null-tokenizer-eod-id')} is not below {flags.shown('--vocab-size')}: change one"


def _check_learning_rates(flags: FlagValues) -> Iterator[str]:
    for name in ("--min-lr", "--lr-warmup-init"):
        if flags[name] > flags["--lr"]:
            yield (f"{flags.shown(name)} is above {flags.shown('--lr')}: lower it, or raise --lr")
    lowest = "--min-lr" if flags["--decoupled-min-lr"] is None else "--decoupled-min-lr"
    if flags["--decoupled-lr"] is not None and flags[lowest] > flags["--decoupled-lr"]:
        yield (
            f"{flags.shown(lowest)} is above {flags.shown('--decoupled-lr')}, which decays to it: give a lower "
            "--decoupled-min-lr"
        )


def _check_phases(flags: FlagValues) -> Iterator[str]:
    """Warmup, then decay, and WSD's last steps between them and the end of the decay."""
    unit, said = ("samples", "samples") if has_samples(flags) else ("iters", "steps")
    total: int = flags[f"--train-{unit}"]
    decay: int = flags[f"--lr-decay-{unit}"] or total
    wsd_decay: int | None = flags[f"--lr-wsd-decay-{unit}"]
    if is_wsd(flags) and wsd_decay is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}: the length of its last phase"
    fraction: float | None = flags["--lr-warmup-fraction"]
    warmup: int = flags[f"--lr-warmup-{unit}"] if fraction is None else int(fraction * decay)
    if warmup >= decay:
        yield (
            f"the warmup of {warmup} {said} does not end before the decay of the learning rate does, after {decay}: "
            f"lower --lr-warmup-{unit}, or raise --lr-decay-{unit}"
        )
    elif wsd_decay is not None and warmup + wsd_decay > decay:
        yield (
            f"WSD's last {wsd_decay} {said} and a warmup of {warmup} do not fit into the {decay} {said} until the "
            f"decay ends: lower --lr-wsd-decay-{unit}, or raise --lr-decay-{unit}"
        )


def _check_weight_decay(flags: FlagValues) -> Iterator[str]:
    start, end = flags["--start-weight-decay"], flags["--end-weight-decay"]
    if flags["--weight-decay-incr-style"] == "constant":
        is_given = "--weight-decay" in flags.given
        if start is not None and start == end and is_given and start != flags["--weight-decay"]:
            yield (
                f"{flags.shown('--weight-decay')} and {flags.shown('--start-weight-decay')} "
                f"{flags.shown('--end-weight-decay')} are two values of a constant weight decay: leave one out"
            )
    elif start is None or end is None:
        yield (f"{flags.shown('--weight-decay-incr-style')} needs both --start-weight-decay and --end-weight-decay")
    elif end < start:
        yield (
            f"{flags.shown('--end-weight-decay')} is below {flags.shown('--start-weight-decay')}: "
            "weight decay may grow over a run, not shrink"
        )


def _check_batch(name: str, flags: FlagValues) -> Iterator[str]:
    """Check that microbatches fill batches of the size that ``name`` gives."""
    if flags[name] is not None and _has_rest(flags[name], flags):
        yield f"{flags.shown(name)} is no multiple of {flags.shown('--micro-batch-size')}: change one"


def _check_scheduled_batches(flags: FlagValues) -> Iterator[str]:
    if (schedule := batch_schedule(flags)) is None:
        return
    for size in sorted({size for _, size in schedule.entries}):
        if _has_rest(size, flags):
            yield (
                f"{flags.shown(schedule.flag)}: {size} samples are no multiple of "
                f"{flags.shown('--micro-batch-size')}: change one"
            )


def _has_rest(size: int, flags: FlagValues) -> bool:
    """Whether a batch is no multiple of the microbatch; a plan states its own microbatches."""
    micro: int | None = flags["--micro-batch-size"]
    return micro is not None and size % micro != 0


def _check_virtual_stages(flags: FlagValues) -> Iterator[str]:
    given, pp = flags["--num-layers-per-virtual-pipeline-stage"], flags["--pipeline-model-parallel-size"]
    if given is not None and flags["--num-layers"] % (given * pp):
        yield (
            f"{flags.shown('--num-layers-per-virtual-pipeline-stage')} x --pipeline-model-parallel-size {pp} does not "
            f"divide {flags.shown('--num-layers')}: change one, or give an uneven plan with --hetero-plan"
        )


def _check_loss_scale(flags: FlagValues) -> Iterator[str]:
    if flags["--min-loss-scale"] > flags["--initial-loss-scale"]:
        yield (f"{flags.shown('--min-loss-scale')} is above {flags.shown('--initial-loss-scale')}: lower it")


def _check_profiled_steps(flags: FlagValues) -> Iterator[str]:
    if flags["--profile"] and flags["--profile-step-end"] <= flags["--profile-step-start"]:
        yield (
            f"{flags.shown('--profile-step-end')} is not above {flags.shown('--profile-step-start')}: no step is "
            "profiled; raise it"
        )


_VALUES_FIT: tuple[_Check, ...] = (
    _check_train_samples,
    _check_rampup,
    _check_batch_schedule,
    _check_experts,
    _check_ffn,
    _check_heads,
    _check_positions,
    _check_tokenizer,
    _check_learning_rates,
    _check_phases,
    _check_weight_decay,
    partial(_check_batch, "--global-batch-size"),
    partial(_check_batch, "--eval-global-batch-size"),
    _check_scheduled_batches,
    _check_virtual_stages,
    _check_loss_scale,
    _check_profiled_steps,
)
"""Values that must fit one another, in the order in which they are told."""
