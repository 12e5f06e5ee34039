"""Lists the flags of ``pretrain_gpt.py`` whose values a plan decides, and finds words of a user that contradict them.

The flags are declared in ``megatron/pretrain/cli``, which needs torch and stands above this package; a test reads what
is listed here with the parser there, and holds the model that comes out against the plan's.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.spec.model import VOCABULARY_DIVISOR, ModelSpec

STATED_BY_STAGES = (
    "--hetero-schedule",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
    "--sequence-parallel",
    "--micro-batch-size",
    "--recompute-granularity",
    "--recompute-num-layers",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "--cpu-offloading-num-layers",
)
"""Flags of the uniform plan, which may not stand beside a plan: it states them for each stage."""

LEFT_TO_THE_USER = ("--lr", "--tokenizer-type", "--train-iters", "--data-path")
"""Flags that are required and of which a plan says nothing."""

_IN_THEIR_PLACE = {
    "--train-iters": ("--train-iters", "--train-samples"),
    "--data-path": ("--data-path", "--train-data-path", "--mock-data"),
}


@dataclass(frozen=True, slots=True)
class PlannedFlag:
    """A flag whose value a plan decides.

    value: as it is written; of a switch whether it is given; false for a flag that may not be given.
    also: other values that mean the same.
    is_written: the lines of a launch have it; false where its absence or another flag says the same.
    """

    name: str
    value: str | bool
    also: tuple[str, ...] = ()
    is_written: bool = True

    @property
    def words(self) -> tuple[str, ...]:
        """What a command line says."""
        if not self.is_written or self.value is False:
            return ()
        return (self.name,) if self.value is True else (self.name, str(self.value))

    def agrees(self, given: str) -> bool:
        """Whether a user's ``given`` means the plan's value; empty for a switch."""
        if isinstance(self.value, bool):
            return self.value
        return any(_same(given, each) for each in (self.value, *self.also))

    @property
    def shown(self) -> str:
        """The plan's value for a message."""
        if self.name in STATED_BY_STAGES:
            return "states it for each stage"
        return "does not have it" if self.value is False else f"says {self.value}"


def planned_flags(plan: Plan, path: Path) -> tuple[PlannedFlag, ...]:
    """All flags that ``plan``, which lies in the file ``path``, decides, in the order in which a line has them."""
    return (
        PlannedFlag("--hetero-plan", str(path)),
        *_of_model(plan.model),
        PlannedFlag("--seq-length", str(plan.seq_length)),
        PlannedFlag("--global-batch-size", str(plan.global_batch_size)),
        PlannedFlag("--bf16", plan.precision == "bf16"),
        PlannedFlag("--fp16", plan.precision == "fp16"),
        *_of_dropout(plan),
        *_of_optimizer(plan),
        *(PlannedFlag(name, value=False) for name in STATED_BY_STAGES),
    )


def launch_flags(planned: Sequence[PlannedFlag], given: Sequence[str]) -> tuple[str, ...]:
    """The plan's flags that a user has not ``given`` too, and then his own.

    Raises:
        PlanError: some of his contradict the plan; the message names each with both values.
    """
    of_user = dict(_flags_in(given))
    problems = [
        f"{' '.join([flag.name, of_user[flag.name]]).rstrip()} (the plan {flag.shown})"
        for flag in planned
        if flag.name in of_user and not flag.agrees(of_user[flag.name])
    ]
    if problems:
        raise PlanError(
            f"flags after -- contradict the plan: {', '.join(problems)}; leave them out, or make a plan for them"
        )
    return (*(word for flag in planned if flag.name not in of_user for word in flag.words), *given)


def missing_flags(given: Sequence[str]) -> tuple[str, ...]:
    """Those of :data:`LEFT_TO_THE_USER` that ``given`` has not, nor another in their place."""
    names = {name for name, _ in _flags_in(given)}
    return tuple(name for name in LEFT_TO_THE_USER if names.isdisjoint(_IN_THEIR_PLACE.get(name, (name,))))


def check_nothing_is_missing(given: Sequence[str]) -> None:
    """Checks that a user gives what a plan cannot say.

    Raises:
        ConfigError: something is missing.
    """
    if missing := missing_flags(given):
        raise ConfigError(
            f"required and missing after --: {', '.join(missing)}; add them: a plan says nothing of data, "
            "tokenizer, learning rate and number of steps"
        )


def _of_model(model: ModelSpec) -> Iterator[PlannedFlag]:
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"):
        yield PlannedFlag(_flag_name(name), str(getattr(model, name)))
    shares = model.num_query_groups != model.num_attention_heads
    if shares:
        yield PlannedFlag("--group-query-attention", value=True)
    yield PlannedFlag("--num-query-groups", str(model.num_query_groups), is_written=shares)
    yield PlannedFlag("--max-position-embeddings", str(model.max_position_embeddings))
    yield from _of_positions(model)
    yield PlannedFlag("--normalization", model.normalization)
    yield PlannedFlag("--norm-epsilon", _number(model.norm_epsilon))
    yield PlannedFlag("--swiglu", model.is_gated)
    yield PlannedFlag("--hetero-relu", model.activation == "relu")
    yield PlannedFlag("--disable-bias-linear", not model.linear_bias)
    # With biases everywhere the two switches change nothing, and one of them is refused.
    yield PlannedFlag("--add-qkv-bias", model.qkv_bias, is_written=not model.linear_bias)
    yield PlannedFlag("--hetero-add-proj-bias", model.proj_bias)
    yield PlannedFlag("--qk-layernorm", model.qk_layernorm)
    yield PlannedFlag("--untie-embeddings-and-output-weights", not model.tied_embeddings)
    yield PlannedFlag("--vocab-size", str(model.vocab_size))
    divisors = _vocabulary_divisors(model)
    best = VOCABULARY_DIVISOR if VOCABULARY_DIVISOR in divisors else divisors[0]
    yield PlannedFlag("--make-vocab-size-divisible-by", str(best), also=tuple(map(str, divisors)))
    for name in ("--no-pad-vocab-size", "--disable-pad-vocab-size"):
        yield PlannedFlag(name, model.padded_vocab_size == model.vocab_size, is_written=False)
    yield from _of_experts(model)


def _of_positions(model: ModelSpec) -> Iterator[PlannedFlag]:
    is_rope, scaling = model.position_embedding == "rope", model.rotary_scaling
    yield PlannedFlag("--position-embedding-type", model.position_embedding)
    yield PlannedFlag("--use-rotary-position-embeddings", is_rope, is_written=False)
    yield PlannedFlag("--rotary-base", is_rope and _number(model.rotary_base))
    yield PlannedFlag("--rotary-percent", is_rope and _number(model.rotary_percent))
    is_linear = scaling is not None and scaling.kind == "linear"
    yield PlannedFlag(
        "--rotary-seq-len-interpolation-factor", is_linear and scaling is not None and _number(scaling.factor)
    )
    llama3 = None if is_linear else scaling
    yield PlannedFlag("--use-rope-scaling", llama3 is not None)
    for name, field in (
        ("--rope-scaling-factor", "factor"),
        ("--hetero-rope-low-freq-factor", "low_freq_factor"),
        ("--hetero-rope-high-freq-factor", "high_freq_factor"),
        ("--hetero-rope-original-max-positions", "original_max_position_embeddings"),
    ):
        yield PlannedFlag(name, llama3 is not None and _number(getattr(llama3, field)))


def _of_experts(model: ModelSpec) -> Iterator[PlannedFlag]:
    has_experts = model.num_experts is not None
    yield PlannedFlag("--num-experts", has_experts and str(model.num_experts))
    yield PlannedFlag("--moe-router-topk", has_experts and str(model.moe_router_topk))
    yield PlannedFlag("--moe-ffn-hidden-size", has_experts and str(model.moe_ffn_hidden_size))


def _of_dropout(plan: Plan) -> Iterator[PlannedFlag]:
    for name in ("hidden_dropout", "attention_dropout"):
        if (share := getattr(plan, name)) is not None:
            yield PlannedFlag(_flag_name(name), _number(share))


def _of_optimizer(plan: Plan) -> Iterator[PlannedFlag]:
    yield PlannedFlag("--use-distributed-optimizer", plan.distributed_optimizer)
    if not plan.distributed_optimizer:
        yield PlannedFlag("--overlap-param-gather", value=False)


def _vocabulary_divisors(model: ModelSpec) -> list[int]:
    """Values of ``--make-vocab-size-divisible-by`` that pad the vocabulary as the model has it, ascending."""
    rows, padding = model.padded_vocab_size, model.padded_vocab_size - model.vocab_size
    small = [each for each in range(1, math.isqrt(rows) + 1) if rows % each == 0]
    return [each for each in sorted({*small, *(rows // each for each in small)}) if each > padding]


def _flags_in(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every flag of a command line with its first value, empty for none; the last one of a name counts."""
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word.partition("=")
        behind = words[position + 1] if position + 1 < len(words) else ""
        yield name, value if equals else "" if behind.startswith("--") else behind


def _same(given: str, planned: str) -> bool:
    try:
        return float(given) == float(planned)
    except ValueError:
        return given == planned


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")
