"""Builds a model from the checked values of a configuration, one function per kind of family."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from hetero.errors import ConfigError
from hetero.spec.hugging_face.keys import ConfigValues
from hetero.spec.hugging_face.rotary import rotary_positions
from hetero.spec.model import VOCABULARY_DIVISOR, ModelSpec, padded_vocab_size


def llama_like(values: ConfigValues) -> ModelSpec:
    """Builds a Llama, Mistral, Qwen2, Qwen3 or Mixtral: rotary positions, RMSNorm, a gated MLP or experts."""
    _check_windows(values)
    base, scaling = rotary_positions(values)
    heads = values["num_attention_heads"]
    mixtral = values.family == "mixtral"
    return ModelSpec(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=values["num_key_value_heads"] or heads,
        kv_channels=values["head_dim"] or values["hidden_size"] // heads,
        ffn_hidden_size=values["intermediate_size"],
        **_vocabulary(values),
        max_position_embeddings=values["max_position_embeddings"],
        position_embedding="rope",
        rotary_base=base,
        rotary_scaling=scaling,
        normalization="RMSNorm",
        norm_epsilon=float(values["rms_norm_eps"]),
        activation="swiglu",
        **_biases(values),
        qk_layernorm=values.family == "qwen3",
        tied_embeddings=values["tie_word_embeddings"],
        num_experts=values["num_local_experts"] if mixtral else None,
        moe_router_topk=_experts_per_token(values) if mixtral else 2,
        moe_ffn_hidden_size=values["intermediate_size"] if mixtral else None,
    )


def gpt2(values: ConfigValues) -> ModelSpec:
    """Builds a GPT-2: learned positions, LayerNorm, biases everywhere, GELU or ReLU."""
    return ModelSpec(
        num_layers=values["n_layer"],
        ffn_hidden_size=values["n_inner"] or 4 * values["n_embd"],
        max_position_embeddings=values["n_positions"],
        norm_epsilon=float(values["layer_norm_epsilon"]),
        **_heads(values, hidden_key="n_embd", heads_key="n_head"),
        **_LIKE_GPT2,
        activation="relu" if values["activation_function"] == "relu" else "gelu",
        **_vocabulary(values),
        tied_embeddings=values["tie_word_embeddings"],
    )


def opt(values: ConfigValues) -> ModelSpec:
    """Builds an OPT: a GPT-2 whose configuration has other keys; as published it has ReLU."""
    return ModelSpec(
        num_layers=values["num_hidden_layers"],
        ffn_hidden_size=values["ffn_dim"],
        max_position_embeddings=values["max_position_embeddings"],
        **_heads(values, hidden_key="hidden_size", heads_key="num_attention_heads"),
        **_LIKE_GPT2,
        activation="relu" if values["activation_function"] == "relu" else "gelu",
        **_vocabulary(values),
        tied_embeddings=values["tie_word_embeddings"],
    )


_LIKE_GPT2: Mapping[str, Any] = MappingProxyType(
    {
        "position_embedding": "learned_absolute",
        "normalization": "LayerNorm",
        "linear_bias": True,
        "qkv_bias": True,
    }
)

BUILDERS: Mapping[str, Callable[[ConfigValues], ModelSpec]] = MappingProxyType(
    dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), llama_like) | {"gpt2": gpt2, "opt": opt}
)


def _vocabulary(values: ConfigValues) -> dict[str, Any]:
    rows = values["vocab_size"]
    return {"vocab_size": rows, "padded_vocab_size": padded_vocab_size(rows, divisible_by=VOCABULARY_DIVISOR)}


def _heads(values: ConfigValues, *, hidden_key: str, heads_key: str) -> dict[str, Any]:
    hidden, heads = values[hidden_key], values[heads_key]
    if hidden % heads:
        raise ConfigError(f"{heads_key} {heads} does not divide {hidden_key} {hidden}: change one of them")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
    }


def _biases(values: ConfigValues) -> dict[str, Any]:
    if values.family == "qwen2":
        return {"linear_bias": False, "qkv_bias": True}
    attention, mlp = values["attention_bias"], values["mlp_bias"]
    if mlp and not attention:
        raise ConfigError(
            "mlp_bias is true and attention_bias false: GPTModel here has biases in both, in attention alone, or in "
            "neither"
        )
    return {"linear_bias": mlp, "qkv_bias": attention, "proj_bias": attention and not mlp}


def _experts_per_token(values: ConfigValues) -> int:
    experts: int = values["num_experts_per_tok"]
    if experts == 1:
        raise ConfigError(
            "num_experts_per_tok is 1: Mixtral then weighs its expert with 1 and its router learns nothing, GPTModel "
            "here weighs it with the router's probability; write a model file as in scripts/presets/models/ for that"
        )
    return experts


def _check_windows(values: ConfigValues) -> None:
    """Refuses sliding windows, but for one that holds the longest sequence, which changes nothing."""
    window: int | None = values["sliding_window"]
    if values.family.startswith("qwen"):
        window = window if values["use_sliding_window"] else None
        if not _has_sliding_layers(values, window):
            return
    longest = values["max_position_embeddings"]
    if window is not None and window < longest:
        raise ConfigError(
            f"sliding_window {window} is below max_position_embeddings {longest}, and attention here sees the whole "
            f"sequence; lower max_position_embeddings to {window} for sequences that fit into the window"
        )


def _has_sliding_layers(values: ConfigValues, window: int | None) -> bool:
    """Whether a Qwen has layers with a window: as ``layer_types`` says, else those from ``max_window_layers`` on."""
    types: list[str] | None = values["layer_types"]
    num_layers = values["num_hidden_layers"]
    if types is None:
        return window is not None and values["max_window_layers"] < num_layers
    if len(types) != num_layers:
        raise ConfigError(f"layer_types has {len(types)} entries for num_hidden_layers {num_layers}: one is wrong")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"layer_types has {min(unknown)!r}, attention here is full_attention")
    if "sliding_attention" in types and window is None:
        raise ConfigError("layer_types has 'sliding_attention', but there is no window: set all to 'full_attention'")
    return "sliding_attention" in types
