"""Describes a GPT-style model by every number that changes its parameters or arithmetic, and by nothing else.

A plan carries its model, so that a plan for another model is refused by the field that differs, and so that
``padded_vocab_size`` is a property of the model and not of a tensor-parallel degree.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.serialization import STRICT

MAX_BLOCKS = 100_000
"""Limit of layers x experts. Everything that lists parameters, from the validator to a checkpoint, has some entries
for each; the largest models have a fourth of it (61 layers of 384 experts)."""

MAX_LAYERS = 10_000
"""Limit of a model's depth, several times that of the deepest there is (2,500 attention and MLP sublayers in DeepNet,
arXiv 2203.00555); stages are balanced layer by layer."""

MAX_SIZE = 10**9
"""Limit of every size of a model. With it, the products of sizes that are counted stay exact as floats need them."""

Activation = Literal["gelu", "relu", "swiglu"]
"""Activations that an MLP may have."""

VOCABULARY_DIVISOR = 128
"""Default of Megatron-LM's ``--make-vocab-size-divisible-by``; tensor parallelism has to divide the rows."""

MAX_VOCABULARY_DIVISOR = 2**16
"""Limit of that flag, and so of the rows of padding, in what reads files: padding is allocated, and in no file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How rotary wavelengths are stretched, for sequences longer than those that a model was first trained on.

    ``linear`` divides every position by ``factor``. ``llama3`` (Llama 3.1) divides the frequency of the wavelengths
    above ``original_max_position_embeddings / low_freq_factor`` by it, keeps those below ``.../ high_freq_factor``, and
    interpolates between. The last three fields are of ``llama3``, and ``None`` for ``linear``.

    kind: how.
    factor: how many times, at least 1.
    low_freq_factor, high_freq_factor: as above, the second above the first.
    original_max_position_embeddings: tokens of the sequences that the model was first trained on.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ConfigError(f"rotary_scaling: factor is {self.factor}, must be at least 1")
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        if self.kind == "linear":
            if (low, high, original) != (None, None, None):
                raise ConfigError("rotary_scaling: linear has nothing but a factor, leave out the other fields")
            return
        if low is None or high is None or original is None:
            raise ConfigError(
                "rotary_scaling: llama3 needs low_freq_factor, high_freq_factor and original_max_position_embeddings"
            )
        if not 0 < low < high:
            raise ConfigError(
                f"rotary_scaling: low_freq_factor is {low} and high_freq_factor {high}, the first must be above 0 and "
                "below the second"
            )
        if original < 1:
            raise ConfigError(f"rotary_scaling: original_max_position_embeddings is {original}, must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only transformer as megatron-core's ``GPTModel`` builds it.

    num_layers: transformer layers, each with attention and an MLP.
    hidden_size: numbers that stand for a token between layers.
    num_attention_heads: heads of queries.
    num_query_groups: heads of keys and values, each for as many heads of queries.
    ffn_hidden_size: rows of one MLP projection; a gated MLP has two of them (gate and up).
    kv_channels: size of one attention head.
    vocab_size: tokens of the tokenizer.
    padded_vocab_size: rows of the embedding; logits of rows from ``vocab_size`` on are masked out.
    max_position_embeddings: the longest sequence, in tokens.
    position_embedding: a table of positions that are learned, or rotations of queries and keys.
    rotary_base: of the wavelengths of the rotations.
    rotary_percent: the part of each head that is rotated.
    rotary_scaling: ``None`` for wavelengths as ``rotary_base`` makes them.
    normalization: kind of the norms before attention, before the MLP and at the end.
    norm_epsilon: added to the variance in a norm.
    activation: ``gelu`` is the tanh form of GPT-2 and of Megatron's fused kernel, ``relu`` is OPT's, ``swiglu`` gated.
    linear_bias: all linear layers have a bias.
    qkv_bias, proj_bias: without ``linear_bias``, queries, keys and values have one, or the output of attention.
    qk_layernorm: queries and keys of each head pass a norm.
    tied_embeddings: the head multiplies by the embedding's own weights.
    num_experts: experts of every layer's MLP, ``None`` for a dense model.
    moe_router_topk: experts that compute a token.
    moe_ffn_hidden_size: as ``ffn_hidden_size``, of one expert.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    position_embedding: Literal["learned_absolute", "rope"]
    rotary_base: float = 10_000.0
    rotary_percent: float = 1.0
    rotary_scaling: RotaryScaling | None = None
    normalization: Literal["LayerNorm", "RMSNorm"]
    norm_epsilon: float = 1e-5
    activation: Activation
    linear_bias: bool
    qkv_bias: bool
    proj_bias: bool = False
    qk_layernorm: bool = False
    tied_embeddings: bool
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        num_blocks = self.num_layers * (self.num_experts or 1)
        if num_blocks > MAX_BLOCKS:
            raise ConfigError(
                f"model: num_layers {self.num_layers} x num_experts {self.num_experts or 1} is {num_blocks:,}, at most "
                f"{MAX_BLOCKS:,} can be listed; is a number wrong?"
            )
        if self.norm_epsilon <= 0:
            raise ConfigError(f"model: norm_epsilon is {self.norm_epsilon}, must be above 0")
        if self.linear_bias and self.proj_bias:
            raise ConfigError("model: linear_bias gives the output of attention a bias already, set proj_bias to false")
        self._check_rotary()
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"model: num_query_groups {self.num_query_groups} does not divide "
                f"num_attention_heads {self.num_attention_heads}; change one"
            )
        if self.padded_vocab_size < self.vocab_size:
            raise ConfigError(
                f"model: padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        if self.num_experts is not None:
            if self.moe_ffn_hidden_size is None:
                raise ConfigError("model: num_experts is set, so moe_ffn_hidden_size must be set as well")
            if self.linear_bias:
                raise ConfigError(
                    "model: linear_bias with num_experts: the experts here have no biases, set it to false"
                )
            if self.moe_router_topk > self.num_experts:
                raise ConfigError(
                    f"model: moe_router_topk {self.moe_router_topk} exceeds num_experts {self.num_experts}"
                )

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if value < 1:
                raise ConfigError(f"model: {field.name} is {value}, must be at least 1")
            most = MAX_LAYERS if field.name == "num_layers" else MAX_SIZE
            if value > most:
                raise ConfigError(f"model: {field.name} is {value:,}, must be at most {most:,}; is the number wrong?")

    def _check_rotary(self) -> None:
        if self.rotary_base <= 0:
            raise ConfigError(f"model: rotary_base is {self.rotary_base}, must be above 0")
        if not 0 < self.rotary_percent <= 1:
            raise ConfigError(f"model: rotary_percent is {self.rotary_percent}, must be above 0 and at most 1")
        if self.rotary_scaling is not None and self.position_embedding != "rope":
            raise ConfigError(
                f"model: rotary_scaling with position_embedding {self.position_embedding}: only rope is scaled, leave "
                "it out"
            )

    @property
    def is_gated(self) -> bool:
        """The MLP has a gate projection beside the up projection, as SwiGLU has."""
        return self.activation == "swiglu"


def differing_fields(ours: ModelSpec, theirs: ModelSpec) -> list[str]:
    """Names the fields in which two models differ, in the order of their declaration."""
    names = [field.name for field in dataclasses.fields(ModelSpec)]
    return [name for name in names if getattr(ours, name) != getattr(theirs, name)]


def first_difference(ours: ModelSpec, theirs: ModelSpec) -> str | None:
    """Names the first field in which two models differ, as ``field ours, not theirs``; ``None`` if they are equal."""
    for name in differing_fields(ours, theirs):
        return f"{name} {getattr(ours, name)!r}, not {getattr(theirs, name)!r}"
    return None


def sequence_length_error(model: ModelSpec, seq_length: int) -> str | None:
    """Say why ``model`` cannot take sequences of ``seq_length`` tokens; ``None`` if it can.

    A learned table of positions ends at ``max_position_embeddings``. Rotations go on, but the model has seen none of
    those beyond; one that is to learn them says so by a larger ``max_position_embeddings``.
    """
    most = model.max_position_embeddings
    if seq_length < 1:
        return f"seq_length is {seq_length}, must be at least 1"
    if seq_length <= most:
        return None
    beyond = (
        "its table of positions ends there; shorten the sequences, or take a model with as many positions"
        if model.position_embedding == "learned_absolute"
        else "its rotations were trained so far; shorten the sequences, or raise max_position_embeddings, with "
        "rotary_scaling if the model was trained on shorter ones"
    )
    return f"seq_length {seq_length} exceeds the model's max_position_embeddings {most}: {beyond}"


def padded_vocab_size(vocab_size: int, *, divisible_by: int) -> int:
    """Rounds ``vocab_size`` up to a multiple of ``divisible_by``.

    Megatron-LM multiplies the divisor by the tensor-parallel degree, which makes the model depend on the plan;
    here the plan has to fit the model instead, and the validator refuses a ``tp`` that does not divide the rows.
    """
    return math.ceil(vocab_size / divisible_by) * divisible_by
