"""Maps our parameters to the tensors of Hugging Face's Llama, Mistral, Qwen2, Qwen3, Mixtral and GPT-2.

Every rearrangement is linear and has an inverse, so that it serves gradients as it serves weights, and a round trip
is exact.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from hetero.checkpoint.interchange.formats import ModelType
from hetero.errors import CheckpointError
from hetero.spec.hugging_face.generation import TOKEN_IDS, GenerationConfig
from hetero.spec.model import ModelSpec, RotaryScaling

TensorLayout = Literal["same", "transposed", "vocabulary", "query_key_value", "fused_query_key_value", "gate_up"]
"""same: one tensor, as it is.
transposed: GPT-2's linear layers (``Conv1D``) keep weights as [input, output].
vocabulary: ours has padding rows at the end, zero on the way in and cut off on the way out.
query_key_value: three tensors; ours has per query group its queries, then its key, then its value.
fused_query_key_value: GPT-2's one tensor of all queries, all keys, all values; a transposed matrix, or a bias.
gate_up: two tensors, one after the other in ours.
"""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One of our parameters and the tensors of theirs that it is made of."""

    ours: str
    theirs: tuple[str, ...]
    layout: TensorLayout = "same"


def rows(model: ModelSpec) -> list[TensorMapping]:
    """All of a model's parameters, in the order of the forward."""
    return list(_gpt2(model) if model.position_embedding == "learned_absolute" else _llama(model))


def join(model: ModelSpec, layout: TensorLayout, theirs: Tensors) -> torch.Tensor:
    """Our tensor, made of theirs."""
    match layout:
        case "same":
            [tensor] = theirs
            return tensor
        case "transposed":
            [tensor] = theirs
            return tensor.T
        case "vocabulary":
            [tensor] = theirs
            padding = tensor.new_zeros(model.padded_vocab_size - tensor.shape[0], *tensor.shape[1:])
            return torch.cat([tensor, padding])
        case "gate_up":
            return torch.cat(list(theirs))
        case "query_key_value":
            groups = [tensor.reshape(model.num_query_groups, -1, *tensor.shape[1:]) for tensor in theirs]
            return torch.cat(groups, dim=1).flatten(0, 1)
        case "fused_query_key_value":
            [tensor] = theirs
            return join(model, "query_key_value", _output_first(tensor).chunk(3))


def split(model: ModelSpec, layout: TensorLayout, ours: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Their tensors, the inverse of :func:`join`."""
    match layout:
        case "same":
            return (ours,)
        case "transposed":
            return (ours.T,)
        case "vocabulary":
            return (ours[: model.vocab_size],)
        case "gate_up":
            return ours.chunk(2)
        case "query_key_value":
            per_group = ours.reshape(model.num_query_groups, -1, *ours.shape[1:])
            queries = per_group.shape[1] - 2 * model.kv_channels
            sizes = [queries, model.kv_channels, model.kv_channels]
            return tuple(part.flatten(0, 1) for part in per_group.split(sizes, dim=1))
        case "fused_query_key_value":
            return (_output_first(torch.cat(split(model, "query_key_value", ours))),)


def _output_first(tensor: torch.Tensor) -> torch.Tensor:
    """Swaps input and output of a ``Conv1D`` weight; a bias has no input."""
    return tensor.T if tensor.dim() == 2 else tensor


def _llama(model: ModelSpec) -> Iterator[TensorMapping]:
    yield TensorMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
    for layer in range(model.num_layers):
        yield from _llama_layer(model, f"decoder.layers.{layer}", f"model.layers.{layer}")
    yield TensorMapping("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not model.tied_embeddings:
        yield TensorMapping("output_layer.weight", ("lm_head.weight",), "vocabulary")


def _llama_layer(model: ModelSpec, ours: str, theirs: str) -> Iterator[TensorMapping]:
    attention = f"{theirs}.self_attn"
    biased = ("weight", "bias") if model.linear_bias else ("weight",)
    proj_biased = ("weight", "bias") if model.linear_bias or model.proj_bias else ("weight",)
    yield TensorMapping(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",))
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        names = tuple(f"{attention}.{which}_proj.{kind}" for which in "qkv")
        yield TensorMapping(f"{ours}.self_attention.linear_qkv.{kind}", names, "query_key_value")
    if model.qk_layernorm:
        for which in "qk":
            yield TensorMapping(
                f"{ours}.self_attention.{which}_layernorm.weight", (f"{attention}.{which}_norm.weight",)
            )
    for kind in proj_biased:
        yield TensorMapping(f"{ours}.self_attention.linear_proj.{kind}", (f"{attention}.o_proj.{kind}",))
    yield TensorMapping(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    if model.num_experts is None:
        for kind in biased:
            names = tuple(f"{theirs}.mlp.{which}_proj.{kind}" for which in ("gate", "up"))
            yield TensorMapping(f"{ours}.mlp.linear_fc1.{kind}", names, "gate_up")
            yield TensorMapping(f"{ours}.mlp.linear_fc2.{kind}", (f"{theirs}.mlp.down_proj.{kind}",))
        return
    moe = f"{theirs}.block_sparse_moe"
    yield TensorMapping(f"{ours}.mlp.router.weight", (f"{moe}.gate.weight",))
    for expert in range(model.num_experts):
        its = f"{ours}.mlp.experts.local_experts.{expert}"
        gate, down, up = (f"{moe}.experts.{expert}.w{number}.weight" for number in (1, 2, 3))
        yield TensorMapping(f"{its}.linear_fc1.weight", (gate, up), "gate_up")
        yield TensorMapping(f"{its}.linear_fc2.weight", (down,))


def _gpt2(model: ModelSpec) -> Iterator[TensorMapping]:
    yield TensorMapping("embedding.word_embeddings.weight", ("transformer.wte.weight",), "vocabulary")
    yield TensorMapping("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        layout: TensorLayout
        for kind, layout in (("weight", "transposed"), ("bias", "same")):
            yield TensorMapping(f"{ours}.input_layernorm.{kind}", (f"{theirs}.ln_1.{kind}",))
            yield TensorMapping(
                f"{ours}.self_attention.linear_qkv.{kind}", (f"{theirs}.attn.c_attn.{kind}",), "fused_query_key_value"
            )
            yield TensorMapping(f"{ours}.self_attention.linear_proj.{kind}", (f"{theirs}.attn.c_proj.{kind}",), layout)
            yield TensorMapping(f"{ours}.pre_mlp_layernorm.{kind}", (f"{theirs}.ln_2.{kind}",))
            yield TensorMapping(f"{ours}.mlp.linear_fc1.{kind}", (f"{theirs}.mlp.c_fc.{kind}",), layout)
            yield TensorMapping(f"{ours}.mlp.linear_fc2.{kind}", (f"{theirs}.mlp.c_proj.{kind}",), layout)
    for kind in ("weight", "bias"):
        yield TensorMapping(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))
    if not model.tied_embeddings:
        yield TensorMapping("output_layer.weight", ("lm_head.weight",), "vocabulary")


def model_types(model: ModelSpec) -> tuple[ModelType, ...]:
    """The families that compute what ``model`` computes, the likeliest first.

    Raises:
        CheckpointError: there is none.
    """
    ungated = "relu" if model.activation == "relu" else "gelu"
    gpt2 = {"normalization": "LayerNorm", "activation": ungated, "linear_bias": True, "qkv_bias": True}
    llama = {"normalization": "RMSNorm", "activation": "swiglu", "rotary_percent": 1.0}
    dense = {**llama, "num_experts": None}
    plain = {"qkv_bias": False, "proj_bias": False, "linear_bias": False, "qk_layernorm": False}
    # Llama and Qwen3 have all biases of attention or none. Mixtral weighs a single expert with 1, ours with the
    # probability that its router gives.
    attention = {
        "qkv_bias": model.qkv_bias or model.linear_bias,
        "proj_bias": model.qkv_bias and not model.linear_bias,
    }
    experts = {"num_experts": model.num_experts or 1, "moe_router_topk": max(2, model.moe_router_topk)}
    needs: dict[ModelType, dict[str, object]] = {
        "llama": {**dense, **attention, "qk_layernorm": False},
        "mistral": {**dense, **plain},
        "qwen2": {**dense, **plain, "qkv_bias": True},
        "qwen3": {**dense, **attention, "qk_layernorm": True, "linear_bias": False},
        "mixtral": {**llama, **plain, **experts},
        "gpt2": {**gpt2, "num_experts": None, "kv_channels": model.hidden_size // model.num_attention_heads},
    }
    learned = model.position_embedding == "learned_absolute"
    wrong: dict[str, str] = {}
    for kind, fields in needs.items():
        if (kind == "gpt2") != learned:
            continue
        differing = [
            f"{name} {getattr(model, name)}" for name, value in fields.items() if getattr(model, name) != value
        ]
        if kind == "gpt2" and model.num_query_groups != model.num_attention_heads:
            differing.append(f"num_query_groups {model.num_query_groups}")
        if differing:
            wrong[kind] = ", ".join(differing)
    found = tuple(kind for kind in needs if (kind == "gpt2") == learned and kind not in wrong)
    if not found:
        reasons = "; ".join(f"not {kind}: {reason}" for kind, reason in wrong.items())
        raise CheckpointError(f"no Hugging Face family computes what this model computes ({reasons})")
    return found


def config_of(
    model: ModelSpec,
    model_type: ModelType,
    dtype: torch.dtype,
    generation_config: GenerationConfig = MappingProxyType({}),
) -> dict[str, object]:
    """Return the ``config.json`` of ``model``, with both names of the keys that transformers 5 renamed.

    It has every key that changes what the model computes or where a text ends: for a key that is left out,
    transformers takes the default of its class, which is that of another model.

    Args:
        generation_config: names the tokens that begin and end a text; ``null`` is written for those that it does not
            name.
    """
    name = str(dtype).removeprefix("torch.")
    builders: dict[ModelType, tuple[str, Callable[[ModelSpec], Mapping[str, object]]]] = {
        "llama": ("LlamaForCausalLM", _llama_config),
        "mistral": ("MistralForCausalLM", _llama_config),
        "qwen2": ("Qwen2ForCausalLM", _qwen_config),
        "qwen3": ("Qwen3ForCausalLM", _qwen_config),
        "mixtral": ("MixtralForCausalLM", _mixtral_config),
        "gpt2": ("GPT2LMHeadModel", _gpt2_config),
    }
    architecture, build = builders[model_type]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": name,
        "torch_dtype": name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "is_encoder_decoder": False,
        **{key: generation_config.get(key) for key in TOKEN_IDS},
        **build(model),
    }


_NO_DROPOUT = 0.0
"""Dropout belongs to a run, and a checkpoint does not have it; GPT-2's class would drop a tenth in further training."""


def _llama_config(model: ModelSpec) -> dict[str, object]:
    scaling = _rope_scaling(model.rotary_scaling)
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rotary_base, **(scaling or {"rope_type": "default"})},
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": model.linear_bias or model.proj_bias,
        "mlp_bias": model.linear_bias,
        "attention_dropout": _NO_DROPOUT,
    }


def _qwen_config(model: ModelSpec) -> dict[str, object]:
    return {
        **_llama_config(model),
        "max_window_layers": model.num_layers,
        "layer_types": ["full_attention"] * model.num_layers,
    }


def _mixtral_config(model: ModelSpec) -> dict[str, object]:
    return {
        **_llama_config(model),
        "intermediate_size": model.moe_ffn_hidden_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
    }


def _rope_scaling(scaling: RotaryScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    stated = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
    return {"rope_type": stated.pop("kind"), **stated}


def _gpt2_config(model: ModelSpec) -> dict[str, object]:
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "activation_function": "relu" if model.activation == "relu" else "gelu_new",
        "layer_norm_epsilon": model.norm_epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "resid_pdrop": _NO_DROPOUT,
        "embd_pdrop": _NO_DROPOUT,
        "attn_pdrop": _NO_DROPOUT,
    }
