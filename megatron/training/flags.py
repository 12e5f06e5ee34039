"""The flags: names, types, defaults and help, and the step from a command line to one value per flag.

Names and defaults are Megatron-LM's where it has them. What flags mean together is decided in
:mod:`megatron.training.arguments`.
"""

import argparse
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hetero.errors import ConfigError
from hetero.schedule.orders import BY_DEPTHS, ORDERS
from hetero.serialization import near_match
from megatron.training.flag_kinds import (
    BELOW_1,
    COUNT,
    COUNT_FROM_0,
    FRACTION,
    FROM_1,
    HEARTBEAT_SECONDS,
    LOSS_SCALE,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    PREFIXES,
    PROCESSES,
    SECONDS,
    SEED,
    SPLIT,
    SWITCH,
    TIME_SCALE,
    TIMEOUT_MINUTES,
    TOKENIZER,
    Kind,
    one_of,
    only,
    text,
)
from megatron.training.unsupported_flags import UNSUPPORTED_FLAGS


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    many: takes one value or more.
    off: a second name, which switches this switch off.
    """

    name: str
    kind: Kind
    help: str
    default: Any = field(default=None, kw_only=True)
    many: bool = field(default=False, kw_only=True)
    off: str | None = field(default=None, kw_only=True)

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.off is None else (self.name, self.off)


def _switch(name: str, help: str) -> Flag:
    return Flag(name, SWITCH, help, default=False)


_MODEL = (
    Flag("--num-layers", COUNT, "Transformer layers of the whole model. Required."),
    Flag("--hidden-size", COUNT, "Width of the residual stream. Required."),
    Flag("--ffn-hidden-size", COUNT, "Width of the MLP; without it 4 x hidden size, with --swiglu two thirds of that."),
    Flag("--num-attention-heads", COUNT, "Query heads of each layer. Required."),
    Flag("--kv-channels", COUNT, "Size of one head; without it hidden size / heads."),
    _switch("--group-query-attention", "Let query heads share keys and values, in --num-query-groups groups."),
    Flag("--num-query-groups", COUNT, "Heads of keys and values; must divide the query heads.", default=1),
    Flag("--max-position-embeddings", COUNT, "Positions that the model knows, at least --seq-length. Required."),
    Flag(
        "--position-embedding-type",
        one_of("learned_absolute", "rope"),
        "A learned vector per position, or rotated queries and keys.",
        default="learned_absolute",
    ),
    _switch("--use-rotary-position-embeddings", "Old name of --position-embedding-type rope."),
    Flag("--rotary-base", POSITIVE, "Base of the wavelengths at which positions rotate.", default=10_000.0),
    Flag("--rotary-percent", FRACTION, "Part of each head that is rotated.", default=1.0),
    Flag("--rotary-seq-len-interpolation-factor", FROM_1, "Divide positions by this, for sequences as much longer."),
    _switch("--use-rope-scaling", "Divide the frequency of long wavelengths alone, as Llama 3.1 does."),
    Flag("--rope-scaling-factor", FROM_1, "With that: by this.", default=8.0),
    Flag("--hetero-rope-low-freq-factor", POSITIVE, "With that: where wavelengths are long.", default=1.0),
    Flag("--hetero-rope-high-freq-factor", POSITIVE, "With that: where they are short and kept.", default=4.0),
    Flag("--hetero-rope-original-max-positions", COUNT, "With that: positions before the scaling.", default=8192),
    Flag("--normalization", one_of("LayerNorm", "RMSNorm"), "Norm before attention and MLP.", default="LayerNorm"),
    Flag("--norm-epsilon", POSITIVE, "Added to the variance in norms.", default=1e-5),
    _switch("--swiglu", "Gate the MLP with SiLU; without it the MLP is a plain one with GeLU."),
    _switch("--disable-bias-linear", "No biases in linear layers."),
    _switch("--add-qkv-bias", "With --disable-bias-linear: keep the bias of queries, keys and values."),
    _switch("--hetero-add-proj-bias", "With --disable-bias-linear: keep the bias of attention's output."),
    _switch("--qk-layernorm", "Normalize queries and keys of each head."),
    _switch("--untie-embeddings-and-output-weights", "Give the output layer a matrix of its own."),
    Flag("--vocab-size", COUNT, "Tokens of the model, at least the tokenizer's; without it, the tokenizer's."),
    Flag(
        "--make-vocab-size-divisible-by",
        COUNT,
        "Pad the embedding to a multiple of this. Unlike Megatron-LM, the tensor-parallel size plays no part.",
        default=128,
    ),
    Flag("--num-experts", COUNT, "Make every MLP a mixture of this many experts."),
    Flag("--moe-router-topk", COUNT, "Experts that each token visits.", default=2),
    Flag("--moe-ffn-hidden-size", COUNT, "Width of one expert; without it, --ffn-hidden-size."),
    Flag(
        "--moe-router-load-balancing-type",
        one_of("none", "aux_loss"),
        "Whether an extra loss spreads tokens over the experts.",
        default="aux_loss",
    ),
    Flag("--moe-aux-loss-coeff", NOT_NEGATIVE, "Weight of that loss.", default=0.0),
    Flag("--init-method-std", POSITIVE, "Standard deviation of the initial weights.", default=0.02),
    Flag(
        "--transformer-impl",
        one_of("auto", "local", "transformer_engine"),
        "Whose layers: TransformerEngine's, megatron-core's own, or the former wherever they can run.",
        default="auto",
    ),
)

_REGULARIZATION = (
    Flag("--attention-dropout", BELOW_1, "Share of attention weights dropped.", default=0.1),
    Flag("--hidden-dropout", BELOW_1, "Share of the outputs of attention and MLP dropped.", default=0.1),
    Flag("--weight-decay", NOT_NEGATIVE, "Decay of matrices, while its style is constant.", default=0.01),
    Flag(
        "--weight-decay-incr-style",
        one_of("constant", "linear", "cosine"),
        "How weight decay grows from --start-weight-decay to --end-weight-decay over the run.",
        default="constant",
    ),
    Flag("--start-weight-decay", NOT_NEGATIVE, "Weight decay of the first step."),
    Flag("--end-weight-decay", NOT_NEGATIVE, "Weight decay of the last step."),
    Flag("--clip-grad", NOT_NEGATIVE, "Scale gradients down to this global norm; 0 never does.", default=1.0),
)

_DATA = (
    Flag("--seq-length", COUNT, "Tokens of one sample. Required."),
    Flag(
        "--data-path",
        PREFIXES,
        "Prefixes of indexed token files, or weights and prefixes in turn; --split divides them.",
        default=(),
        many=True,
    ),
    Flag("--train-data-path", PREFIXES, "The same for training alone, instead of --data-path.", default=(), many=True),
    Flag("--valid-data-path", PREFIXES, "Validation files beside --train-data-path.", default=(), many=True),
    Flag("--test-data-path", PREFIXES, "Test files beside --train-data-path.", default=(), many=True),
    Flag("--split", SPLIT, "Shares of training, validation and test.", default="969, 30, 1"),
    Flag("--data-cache-path", PATH, "Folder that keeps the sample indices between runs."),
    _switch("--mock-data", "Made-up tokens instead of files."),
    Flag(
        "--tokenizer-type",
        TOKENIZER,
        "Bytes as tokens; the tokenizer.json of a Hugging Face model, behind --tokenizer-model; or none, only "
        "--vocab-size many numbers. Required.",
    ),
    Flag("--tokenizer-model", text("PATH"), "A tokenizer.json, or the folder that has it."),
    _switch("--eod-mask-loss", "Leave the end of a document out of the loss."),
    Flag("--num-workers", PROCESSES, "Processes per rank that load samples; 0 loads in the rank.", default=2),
)

_OPTIMIZER = (
    Flag("--optimizer", only("adam", "AdamW does every update"), "Accepted for Megatron-LM's scripts.", default="adam"),
    Flag("--adam-beta1", BELOW_1, "Decay of the gradient's running mean.", default=0.9),
    Flag("--adam-beta2", BELOW_1, "Decay of the squared gradient's running mean.", default=0.999),
    Flag("--adam-eps", POSITIVE, "Added to the denominator of an update.", default=1e-8),
)

_LEARNING_RATE = (
    Flag("--lr", POSITIVE, "Highest learning rate, reached when warmup ends. Required."),
    Flag("--min-lr", NOT_NEGATIVE, "Learning rate at the end of the decay, and after it.", default=0.0),
    Flag(
        "--lr-decay-style",
        one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        "Shape of the decay; WSD stays at --lr until its last steps.",
        default="linear",
    ),
    Flag("--lr-decay-iters", COUNT, "Step at which the decay ends; without it, the last step."),
    Flag("--lr-decay-samples", COUNT, "The same in samples, beside --train-samples."),
    Flag("--lr-warmup-iters", COUNT_FROM_0, "Steps in which the learning rate rises.", default=0),
    Flag("--lr-warmup-samples", COUNT_FROM_0, "The same in samples, beside --train-samples.", default=0),
    Flag("--lr-warmup-fraction", BELOW_1, "The same as a share of the steps until the decay ends."),
    Flag("--lr-warmup-init", NOT_NEGATIVE, "Learning rate from which the warmup rises.", default=0.0),
    Flag(
        "--lr-wsd-decay-style",
        one_of("exponential", "linear", "cosine", "minus_sqrt"),
        "Shape of WSD's last steps.",
        default="exponential",
    ),
    Flag("--lr-wsd-decay-iters", COUNT, "How many steps those are."),
    Flag("--lr-wsd-decay-samples", COUNT, "The same in samples, beside --train-samples."),
)

_PARALLELISM = (
    Flag(
        "--hetero-plan",
        PATH,
        "Plan file (JSON): replicas, stages, ranks and microbatches, none like the other. "
        "'auto' plans at start, for --hetero-cluster or --hetero-emulate.",
    ),
    Flag(
        "--hetero-cluster",
        PATH,
        "Cluster file (YAML). Without a plan file, rank 0 plans for it at start; with one, the plan is checked "
        "against it.",
    ),
    Flag("--hetero-profile", PATH, "With a cluster: profiles beside the shipped ones.", default=(), many=True),
    _switch("--hetero-data-sheets", "With a cluster: price devices without any profile by their data sheets."),
    Flag("--hetero-plan-time-limit", SECONDS, "With a cluster: seconds to plan.", default=30.0),
    Flag("--hetero-plan-out", PATH, "With a cluster: write the plan that was made here."),
    Flag(
        "--hetero-emulate",
        PATH,
        "Instead of --hetero-cluster: behave in time and memory like that cluster, all ranks on this machine's CPU, "
        "while a small model computes.",
    ),
    Flag("--hetero-emulate-time-scale", TIME_SCALE, "Wall seconds per emulated second.", default=1.0),
    Flag("--hetero-emulate-seq-length", COUNT, "Sequence length of the small model that computes.", default=32),
    Flag(
        "--hetero-schedule",
        one_of(*ORDERS),
        "Without a plan: few microbatches in flight, or all of a step.",
        default=BY_DEPTHS,
    ),
    Flag("--tensor-model-parallel-size", COUNT, "Without a plan: ranks that share each layer.", default=1),
    Flag("--pipeline-model-parallel-size", COUNT, "Without a plan: groups of ranks that share the layers.", default=1),
    Flag(
        "--num-virtual-stages-per-pipeline-rank",
        COUNT,
        "Without a plan: stages of each such group, which runs them in turns (interleaved 1F1B).",
        default=1,
    ),
    Flag(
        "--num-layers-per-virtual-pipeline-stage",
        COUNT,
        "The same by the layers of a stage, in place of --num-virtual-stages-per-pipeline-rank.",
    ),
    _switch("--sequence-parallel", "Without a plan: tensor-parallel ranks also share activations, by sequence."),
    Flag("--micro-batch-size", COUNT, "Without a plan, and then required: samples of one microbatch."),
    Flag("--global-batch-size", COUNT, "Samples of one step over all replicas. Required."),
    Flag(
        "--recompute-granularity",
        one_of("selective", "full"),
        "Without a plan: do not keep the inside of attention, or of whole layers, for the backward.",
        default="none",
    ),
    Flag("--recompute-num-layers", COUNT, "With --recompute-granularity full: layers of each stage; without it all."),
    Flag(
        "--context-parallel-size",
        only("1", "context parallelism is not there yet; share long sequences with --sequence-parallel"),
        "Accepted for Megatron-LM's scripts.",
        default="1",
    ),
    Flag(
        "--expert-model-parallel-size",
        only("1", "expert parallelism is not there yet; share experts with --tensor-model-parallel-size"),
        "Accepted for Megatron-LM's scripts.",
        default="1",
    ),
    Flag(
        "--overlap-grad-reduce",
        SWITCH,
        "Sum gradients over replicas while the backward goes on. On unless --no-overlap-grad-reduce is given.",
        default=True,
        off="--no-overlap-grad-reduce",
    ),
    _switch("--use-distributed-optimizer", "Share optimizer state among ranks that hold the same weights (ZeRO-1)."),
    _switch("--overlap-param-gather", "With that: gather updated weights while the next forward goes on."),
    Flag(
        "--ddp-bucket-size", COUNT, "Gradients, in numbers, summed at a time, unless the plan says.", default=40_000_000
    ),
    Flag("--distributed-backend", one_of("gloo", "nccl"), "Who moves tensors; without it nccl if CUDA is there."),
    Flag(
        "--distributed-timeout-minutes",
        TIMEOUT_MINUTES,
        "Give up on a collective, or on a rank that does not arrive, after this time.",
        default=10.0,
    ),
    Flag(
        "--hetero-heartbeat-timeout",
        HEARTBEAT_SECONDS,
        "Take a rank for lost that has given no sign of life for so many seconds, and end all.",
        default=30.0,
    ),
)

_PRECISION = (
    _switch("--bf16", "Compute in bf16, with master weights, gradients and moments in fp32."),
    _switch("--fp16", "The same in fp16, with a scaled loss."),
    Flag("--loss-scale", LOSS_SCALE, "With --fp16: a constant scale of the loss instead of one that adapts."),
    Flag("--initial-loss-scale", LOSS_SCALE, "With --fp16: scale to begin with.", default=2.0**32),
    Flag("--min-loss-scale", LOSS_SCALE, "With --fp16: the scale never goes below.", default=1.0),
    Flag("--loss-scale-window", COUNT, "With --fp16: steps without overflow that double the scale.", default=1000),
    Flag("--hysteresis", COUNT, "With --fp16: overflows from which on each halves the scale.", default=2),
)

_CHECKPOINTS = (
    Flag("--save", PATH, "Folder for checkpoints, which all hosts see. The end of the run is saved always."),
    Flag("--save-interval", COUNT, "With --save: steps from one checkpoint to the next."),
    Flag("--hetero-keep-last", COUNT, "With --save: checkpoints to keep; without it all."),
    _switch("--async-save", "With --save: write in the background while training goes on."),
    Flag("--load", PATH, "Folder of checkpoints, saved under any plan; the run goes on where the newest ends."),
    Flag("--ckpt-step", COUNT, "With --load: the checkpoint of this step instead."),
    _switch("--finetune", "With --load: weights alone; steps, moments and data begin anew."),
)

_RUN = (
    Flag("--train-iters", COUNT, "Steps to train. This or --train-samples is required."),
    Flag("--train-samples", COUNT, "Samples to train, a multiple of --global-batch-size."),
    Flag("--seed", SEED, "Decides initial weights, dropout and the order of samples.", default=1234),
    Flag("--eval-iters", COUNT_FROM_0, "Global batches of an evaluation on validation data; 0 for none.", default=0),
    Flag("--eval-interval", COUNT, "Steps from one evaluation to the next.", default=1000),
    Flag("--exit-interval", COUNT, "Save and leave after a step that is a multiple of this."),
    Flag("--exit-duration-in-mins", POSITIVE, "Save and leave after this time. SIGTERM does so at once."),
    Flag(
        "--check-for-nan-in-loss-and-grad",
        SWITCH,
        "End with an error at a loss or a gradient that is not finite; a loss scale that adapts skips such steps. On "
        "unless --no-check-for-nan-in-loss-and-grad is given, which skips them always.",
        default=True,
        off="--no-check-for-nan-in-loss-and-grad",
    ),
    Flag("--log-interval", COUNT, "Steps from one log line to the next.", default=100),
    Flag("--tensorboard-dir", PATH, "Folder for TensorBoard's files; without it none are written."),
    _switch("--no-progress", "No progress bar."),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": _MODEL,
    "regularization": _REGULARIZATION,
    "data": _DATA,
    "optimizer": _OPTIMIZER,
    "learning rate": _LEARNING_RATE,
    "parallelism": _PARALLELISM,
    "precision": _PRECISION,
    "checkpoints": _CHECKPOINTS,
    "run and logging": _RUN,
}

FLAGS: tuple[Flag, ...] = tuple(flag for flags in GROUPS.values() for flag in flags)


@dataclass(frozen=True, slots=True)
class FlagValues:
    """The value of every flag by its name, and which of them the user gave."""

    values: Mapping[str, Any]
    given: frozenset[str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def shown(self, name: str) -> str:
        """The flag as the user wrote it, for messages."""
        value = self.values[name]
        if isinstance(value, bool):
            return name
        return " ".join([name, *map(str, value)]) if isinstance(value, tuple) else f"{name} {value}"


def read_flags(argv: Sequence[str]) -> FlagValues:
    """The command line as one value per flag. A flag given twice has its last value.

    ``--help`` prints and exits.

    Raises:
        ConfigError: a flag is unknown, or Megatron-LM's and not supported; a value is missing, or not what the flag
            takes.
    """
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.parse_args(["--help"])
    _check_names(argv)
    tokens = _with_negative_numbers_joined(argv)
    _check_each_value_has_a_flag(tokens)
    namespace = parser.parse_args(tokens)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}
    return FlagValues({flag.name: flag.default for flag in FLAGS} | given, frozenset(given))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse would print and exit with 2; a wrong flag is an error like any other here."""
        raise ConfigError(message.removeprefix("argument "))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s FLAGS",
        description="Pretrain a GPT model under the uniform plan of Megatron-LM's own flags, or under a plan file.",
        epilog="Every other flag of Megatron-LM is refused by name, with what to do instead.",
        allow_abbrev=False,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    # Without SUPPRESS a default and a given value could not be told apart.
    help_text = flag.help.replace("%", "%%")
    if flag.is_switch:
        group.add_argument(flag.name, dest=flag.name, action="store_true", default=argparse.SUPPRESS, help=help_text)
        if flag.off is not None:
            group.add_argument(
                flag.off, dest=flag.name, action="store_false", default=argparse.SUPPRESS, help=f"See {flag.name}."
            )
        return
    if flag.default is not None and flag.default != ():
        help_text += f" Default: {flag.default}."
    group.add_argument(
        flag.name,
        dest=flag.name,
        type=flag.kind,
        metavar=flag.kind.shown,
        nargs="+" if flag.many else None,
        default=argparse.SUPPRESS,
        help=help_text,
    )


def _check_names(argv: Sequence[str]) -> None:
    """Refuse unknown and unsupported flags, all of them in one message."""
    switches = {name: flag.is_switch for flag in FLAGS for name in flag.names}
    known = [*switches, *UNSUPPORTED_FLAGS]
    problems = []
    for token in argv:
        if not token.startswith("-") or token == "-" or _is_number(token):
            continue
        name, equals, value = token.partition("=")
        if name in UNSUPPORTED_FLAGS:
            problems.append(f"{name} is not supported: {UNSUPPORTED_FLAGS[name]}")
        elif name not in switches:
            problems.append(f"unknown flag {name}{near_match(name, known) if name.strip('-') else ''}")
        elif equals and switches[name]:
            problems.append(f"{name} takes no value, found {value!r}")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _with_negative_numbers_joined(argv: Sequence[str]) -> list[str]:
    """``--lr -1e-4`` as ``--lr=-1e-4``: argparse takes the first for two flags."""
    valued = {flag.name for flag in FLAGS if not flag.is_switch and not flag.many}
    tokens: list[str] = []
    for token in argv:
        if tokens and tokens[-1] in valued and token.startswith("-") and _is_number(token):
            tokens[-1] += f"={token}"
        else:
            tokens.append(token)
    return tokens


def _check_each_value_has_a_flag(tokens: Sequence[str]) -> None:
    flags = {name: flag for flag in FLAGS for name in flag.names}
    name, room = "", 0.0
    for token in tokens:
        if token.startswith("--"):
            name, equals, _ = token.partition("=")
            room = 0 if flags[name].is_switch or equals else math.inf if flags[name].many else 1
        elif room:
            room -= 1
        elif name and flags[name].is_switch:
            raise ConfigError(f"{name} takes no value, found {token!r}")
        else:
            place = f" after the value of {name}" if name else ""
            raise ConfigError(f"unexpected {token!r}{place}: put the name of its flag in front of it")


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
