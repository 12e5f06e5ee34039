"""Tiny models of the families that Megatron users train. tp 4 divides every cut dimension of each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetero.spec.model import ModelSpec


def gpt2_model(**overrides: Any) -> ModelSpec:
    """GPT-2: learned positions, LayerNorm, GELU, biases, one matrix for embedding and head."""
    return ModelSpec(
        **{
            "num_layers": 6,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "kv_channels": 8,
            "ffn_hidden_size": 64,
            "vocab_size": 61,
            "padded_vocab_size": 64,
            "max_position_embeddings": 64,
            "position_embedding": "learned_absolute",
            "normalization": "LayerNorm",
            "activation": "gelu",
            "linear_bias": True,
            "qkv_bias": True,
            "tied_embeddings": True,
            **overrides,
        }
    )


def llama_model(**overrides: Any) -> ModelSpec:
    """Llama: rotary positions, RMSNorm, SwiGLU, no biases, grouped queries, a head of its own."""
    llama = {
        "num_attention_heads": 8,
        "kv_channels": 4,
        "position_embedding": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "linear_bias": False,
        "qkv_bias": False,
        "tied_embeddings": False,
    }
    return gpt2_model(**{**llama, **overrides})


def moe_model(**overrides: Any) -> ModelSpec:
    """Mixtral: Llama with four experts in every layer, two of them for each token."""
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
    return llama_model(**{**experts, **overrides})


MOE_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "num_experts": "4",
        "disable_bias_linear": "",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": "1.0",
    }
)
"""What a command line says of experts and of an auxiliary loss that no tolerance hides."""
