"""Lists the parameters of a model by canonical name, with their shapes, shards and initial values.

The names are megatron-core's local layer spec with the global layer number. TransformerEngine's fused modules
call the same tensors by other names; :mod:`hetero.runtime.named_parameters` translates. A tied output layer has no
name of its own: the last stage then holds ``embedding.word_embeddings.weight`` a second time.

Positions count layers. A layer has two halves, which may fall on two stages: its attention, with the norm before it, at
its number, and its MLP or experts, with the norm before them, half a layer later.

Tensor parallelism follows Megatron-LM (arXiv 1909.08053): column-parallel weights are cut along dimension 0,
row-parallel ones along 1; sequence parallelism (arXiv 2205.05198) leaves partial gradients on the rest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hetero.spec.model import ModelSpec

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

HALF = 0.5
"""How many layers the MLP of a layer lies behind its attention. Sums of halves are exact in floating point."""

Init = Literal["normal", "scaled_normal", "zeros", "ones"]
"""``scaled_normal`` divides the deviation by sqrt(2 num_layers): the two projections onto the residual stream."""

PartialGradient = Literal["never", "sequence_parallel", "always"]
"""When the tensor-parallel ranks of a replicated parameter hold parts of its gradient, to be summed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of the whole model, as no single rank may hold it.

    shape: global shape.
    position: -1 for the embedding, the layer number for its attention, half a layer more for its MLP, and num_layers
        for the head: the order of the forward.
    shard_dim: the dimension that tensor parallelism cuts, ``None`` if every rank holds all of it.
    blocks: equal parts along ``shard_dim`` that are cut one by one: 2 for a gated MLP's [gate; up], else 1.
    partial_gradient: when tensor-parallel ranks that all hold the parameter have parts of its gradient only.
    """

    name: str
    shape: tuple[int, ...]
    position: float
    shard_dim: int | None = None
    blocks: int = 1
    partial_gradient: PartialGradient = "never"
    init: Init = "normal"

    @property
    def numel(self) -> int:
        """Number of elements, of all shards together."""
        return math.prod(self.shape)

    @property
    def is_word_embedding_or_output(self) -> bool:
        """It turns tokens into vectors, or these into scores of tokens; a tied one does both."""
        return self.name in (EMBEDDING, OUTPUT)

    @property
    def decays(self) -> bool:
        """Weight decay applies to it: Megatron-LM exempts biases and everything else of one dimension."""
        return len(self.shape) > 1

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """The shape of one of ``tp`` shards."""
        if self.shard_dim is None:
            return self.shape
        return tuple(size // tp if dim == self.shard_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True, slots=True)
class ShardInterval:
    """Consecutive indices along a parameter's shard dimension, and where they lie in the model and in a shard."""

    global_start: int
    local_start: int
    length: int


def shard_intervals(parameter: Parameter, *, tp: int, tp_rank: int) -> tuple[ShardInterval, ...]:
    """The intervals that tensor-parallel rank ``tp_rank`` of ``tp`` holds: one per block, in local order."""
    if parameter.shard_dim is None:
        return (ShardInterval(0, 0, 1),)
    block = parameter.shape[parameter.shard_dim] // parameter.blocks
    shard = block // tp
    return tuple(ShardInterval(b * block + tp_rank * shard, b * shard, shard) for b in range(parameter.blocks))


def parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """All parameters of ``model`` in the order of the forward; every name once."""
    rows = list(_embedding(model))
    for layer in range(model.num_layers):
        rows += _layer(model, layer)
    rows += _head(model)
    return tuple(rows)


def stage_parameters(model: ModelSpec, *, first_layer: float, end_layer: float) -> tuple[Parameter, ...]:
    """The parameters that a stage of layers ``[first_layer, end_layer)`` holds, each name once.

    An edge at half a layer is the cut between its attention and its MLP.
    """
    rows: list[Parameter] = []
    if first_layer == 0:
        rows += _embedding(model)
    for layer in range(math.floor(first_layer), math.ceil(end_layer)):
        rows += (parameter for parameter in _layer(model, layer) if first_layer <= parameter.position < end_layer)
    if end_layer == model.num_layers:
        rows += _head(model)
        if model.tied_embeddings and first_layer > 0:
            rows.append(next(p for p in _embedding(model) if p.name == EMBEDDING))
    return tuple(rows)


def _embedding(model: ModelSpec) -> Iterator[Parameter]:
    yield Parameter(name=EMBEDDING, shape=(model.padded_vocab_size, model.hidden_size), position=-1, shard_dim=0)
    if model.position_embedding == "learned_absolute":
        yield Parameter(
            name="embedding.position_embeddings.weight",
            shape=(model.max_position_embeddings, model.hidden_size),
            position=-1,
        )


def _head(model: ModelSpec) -> Iterator[Parameter]:
    yield from _norm(model, "decoder.final_layernorm", model.hidden_size, model.num_layers)
    if not model.tied_embeddings:
        yield Parameter(
            name=OUTPUT,
            shape=(model.padded_vocab_size, model.hidden_size),
            position=model.num_layers,
            shard_dim=0,
        )


def _layer(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    prefix, mlp = f"decoder.layers.{layer}", layer + HALF
    yield from _norm(model, f"{prefix}.input_layernorm", model.hidden_size, layer)
    yield from _attention(model, f"{prefix}.self_attention", layer)
    yield from _norm(model, f"{prefix}.pre_mlp_layernorm", model.hidden_size, mlp)
    if model.num_experts is None:
        yield from _mlp(model, f"{prefix}.mlp", model.ffn_hidden_size, mlp)
        return
    assert model.moe_ffn_hidden_size is not None
    yield Parameter(
        name=f"{prefix}.mlp.router.weight",
        shape=(model.num_experts, model.hidden_size),
        position=mlp,
        partial_gradient="sequence_parallel",
    )
    for expert in range(model.num_experts):
        yield from _mlp(model, f"{prefix}.mlp.experts.local_experts.{expert}", model.moe_ffn_hidden_size, mlp)


def _attention(model: ModelSpec, prefix: str, position: float) -> Iterator[Parameter]:
    # Fused QKV: per query group its queries, then its key, then its value, so a plain cut keeps groups whole.
    query_size = model.num_attention_heads * model.kv_channels
    qkv_size = query_size + 2 * model.num_query_groups * model.kv_channels
    if model.qk_layernorm:
        # One head's norm, shared by all heads: each rank sees only its own heads.
        for which in ("q_layernorm", "k_layernorm"):
            yield from _norm(model, f"{prefix}.{which}", model.kv_channels, position, partial="always")
    yield from _column(f"{prefix}.linear_qkv", (qkv_size, model.hidden_size), position, bias=model.qkv_bias)
    proj_bias = model.linear_bias or model.proj_bias
    yield from _row(f"{prefix}.linear_proj", (model.hidden_size, query_size), position, bias=proj_bias)


def _mlp(model: ModelSpec, prefix: str, ffn_hidden_size: int, position: float) -> Iterator[Parameter]:
    blocks = 2 if model.is_gated else 1
    fc1_shape = (blocks * ffn_hidden_size, model.hidden_size)
    yield from _column(f"{prefix}.linear_fc1", fc1_shape, position, bias=model.linear_bias, blocks=blocks)
    yield from _row(f"{prefix}.linear_fc2", (model.hidden_size, ffn_hidden_size), position, bias=model.linear_bias)


def _column(
    prefix: str, shape: tuple[int, int], position: float, *, bias: bool, blocks: int = 1
) -> Iterator[Parameter]:
    """The parameters of a column-parallel linear layer: output features are cut, of weight and bias alike."""
    yield Parameter(name=f"{prefix}.weight", shape=shape, position=position, shard_dim=0, blocks=blocks)
    if bias:
        yield Parameter(
            name=f"{prefix}.bias", shape=shape[:1], position=position, shard_dim=0, blocks=blocks, init="zeros"
        )


def _row(prefix: str, shape: tuple[int, int], position: float, *, bias: bool) -> Iterator[Parameter]:
    """The parameters of a row-parallel linear layer: input features are cut; every rank adds the bias after the sum."""
    yield Parameter(name=f"{prefix}.weight", shape=shape, position=position, shard_dim=1, init="scaled_normal")
    if bias:
        yield Parameter(
            name=f"{prefix}.bias",
            shape=shape[:1],
            position=position,
            partial_gradient="sequence_parallel",
            init="zeros",
        )


def _norm(
    model: ModelSpec, prefix: str, size: int, position: float, *, partial: PartialGradient = "sequence_parallel"
) -> Iterator[Parameter]:
    yield Parameter(name=f"{prefix}.weight", shape=(size,), position=position, partial_gradient=partial, init="ones")
    if model.normalization == "LayerNorm":
        yield Parameter(name=f"{prefix}.bias", shape=(size,), position=position, partial_gradient=partial, init="zeros")
