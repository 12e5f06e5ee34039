"""Models from a file: our own fields as YAML or JSON, or a Hugging Face ``config.json``.

Only what megatron-core's GPTModel computes the same way is imported; the rest is refused by the key that differs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import checked, load, near_match, parse_json, read_text
from hetero.spec.model import ModelSpec, padded_vocab_size

VOCABULARY_DIVISOR = 128
"""Megatron-LM's ``--make-vocab-size-divisible-by``; tensor parallelism has to divide the rows."""

GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def load_model(path: Path) -> ModelSpec:
    """The model that ``path`` describes.

    Raises:
        ConfigError: the file is missing or malformed, or a Hugging Face model that cannot be expressed.
    """
    if path.suffix == ".json":
        config = parse_json(read_text(path), source=str(path))
        if isinstance(config, dict) and "model_type" in config:
            return model_of_config(config, source=str(path))
    return load(ModelSpec, path)


def model_of_config(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The model of a Hugging Face configuration as it was read from a file, its values of whatever type.

    Raises:
        ConfigError: as :func:`from_hugging_face`, or a value is not of the type that belongs there.
    """
    try:
        model = from_hugging_face(config, source=source)
        return checked(ModelSpec, dataclasses.asdict(model), source=source)
    except ConfigError as error:
        # What ModelSpec says of its numbers does not name the file.
        raise error if str(error).startswith(source) else ConfigError(f"{source}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{source}: a value is not of its type, or not possible: {error}; is every size a whole number above 0?"
        ) from None


def from_hugging_face(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """The model of a Hugging Face configuration of one of the types that ``importers`` names.

    Raises:
        ConfigError: another type, a missing key, or something that GPTModel computes differently.
    """
    importers = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "mixtral"), _llama)
    importers |= {"gpt2": _gpt2, "opt": _opt}
    kind = str(config["model_type"])
    if kind not in importers:
        hint = near_match(kind, list(importers)) or f" (known: {', '.join(importers)})"
        raise ConfigError(f"{source}: unknown model_type {kind!r}{hint}")
    try:
        return importers[kind](config, source)
    except KeyError as error:
        raise ConfigError(f"{source}: missing key {error.args[0]!r} of a {kind} configuration") from None


def _llama(config: Mapping[str, Any], source: str) -> ModelSpec:
    _demand(config, source, "hidden_act", ("silu",))
    kind = config["model_type"]
    num_experts = config["num_local_experts"] if kind == "mixtral" else None
    if config.get("sliding_window") and config.get("use_sliding_window", kind in ("mistral", "mixtral")):
        raise ConfigError(f"{source}: sliding_window {config['sliding_window']} is not supported; set it to null")
    heads = config["num_attention_heads"]
    vocabulary = config["vocab_size"]
    return ModelSpec(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=vocabulary,
        padded_vocab_size=padded_vocab_size(vocabulary, divisible_by=VOCABULARY_DIVISOR),
        max_position_embeddings=config["max_position_embeddings"],
        position_embedding="rope",
        rotary_base=_rotary_base(config, source),
        normalization="RMSNorm",
        norm_epsilon=config.get("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        activation="swiglu",
        linear_bias=bool(config.get("mlp_bias", False)),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
        qk_layernorm=kind == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=num_experts,
        moe_router_topk=config["num_experts_per_tok"] if num_experts else 2,
        moe_ffn_hidden_size=config["intermediate_size"] if num_experts else None,
    )


def _rotary_base(config: Mapping[str, Any], source: str) -> int:
    """transformers 5 moved ``rope_theta`` and ``rope_scaling`` into ``rope_parameters``."""
    rope = config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "default")
    if config.get("rope_scaling") or rope_type != "default":
        raise ConfigError(
            f"{source}: rope_scaling is set (type {rope_type}), which is not supported; plan with a file without it"
        )
    default = 1_000_000 if config["model_type"] == "mixtral" else 10_000
    base = rope.get("rope_theta", config.get("rope_theta", default))
    if base != int(base):
        raise ConfigError(f"{source}: rope_theta is {base}, must be a whole number")
    return int(base)


def _gpt2(config: Mapping[str, Any], source: str) -> ModelSpec:
    _demand(config, source, "activation_function", GELU_TANH)
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        raise ConfigError(f"{source}: attention scores are scaled otherwise than by the square root of a head's size")
    hidden, heads, vocabulary = config["n_embd"], config["n_head"], config["vocab_size"]
    return ModelSpec(
        num_layers=config["n_layer"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=config.get("n_inner") or 4 * hidden,
        vocab_size=vocabulary,
        padded_vocab_size=padded_vocab_size(vocabulary, divisible_by=VOCABULARY_DIVISOR),
        max_position_embeddings=config["n_positions"],
        position_embedding="learned_absolute",
        normalization="LayerNorm",
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        activation="gelu",
        linear_bias=True,
        qkv_bias=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _opt(config: Mapping[str, Any], source: str) -> ModelSpec:
    """OPT as published has ReLU; variants with GELU are imported."""
    _demand(config, source, "activation_function", (*GELU_TANH, "gelu"))
    _demand(config, source, "do_layer_norm_before", (True,))
    hidden, heads, vocabulary = config["hidden_size"], config["num_attention_heads"], config["vocab_size"]
    _demand(config, source, "word_embed_proj_dim", (hidden,))
    return ModelSpec(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=config["ffn_dim"],
        vocab_size=vocabulary,
        padded_vocab_size=padded_vocab_size(vocabulary, divisible_by=VOCABULARY_DIVISOR),
        max_position_embeddings=config["max_position_embeddings"],
        position_embedding="learned_absolute",
        normalization="LayerNorm",
        activation="gelu",
        linear_bias=True,
        qkv_bias=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _demand(config: Mapping[str, Any], source: str, key: str, allowed: tuple[object, ...]) -> None:
    if config[key] not in allowed:
        raise ConfigError(
            f"{source}: {key} is {config[key]!r}, GPTModel here has {' or '.join(map(repr, allowed))}; to plan for the "
            "same shape, write a model file as in scripts/presets/models/"
        )
