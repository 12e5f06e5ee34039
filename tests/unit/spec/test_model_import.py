"""Models from files: our own fields, and Hugging Face configurations."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.spec.model_import import from_hugging_face, load_model

ROOT = Path(__file__).parents[3]

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}


def imported(config: dict[str, Any], **changes: Any) -> Any:
    return from_hugging_face({**config, **changes}, source="config.json")


def test_llama() -> None:
    model = imported(LLAMA)
    assert (model.num_layers, model.num_query_groups, model.kv_channels) == (22, 4, 64)
    assert model.activation == "swiglu"
    assert model.normalization == "RMSNorm"
    assert not model.qkv_bias
    assert model.padded_vocab_size == 32000


def test_qwen2_has_biases_on_queries_keys_and_values() -> None:
    assert imported(LLAMA, model_type="qwen2").qkv_bias


def test_rotary_positions_where_transformers_5_puts_them() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    assert imported(config, rope_parameters=rope).rotary_base == 500_000
    with pytest.raises(ConfigError, match=r"rope_scaling is set \(type llama3\)"):
        imported(config, rope_parameters={**rope, "rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ConfigError, match=r"rope_theta is 0\.5, must be a whole number"):
        imported(config, rope_parameters={"rope_theta": 0.5})


def test_qwen3_and_mixtral() -> None:
    assert imported(LLAMA, model_type="qwen3").qk_layernorm
    mixtral = imported(LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.num_experts, mixtral.moe_router_topk, mixtral.moe_ffn_hidden_size) == (8, 2, 5632)


def test_gpt2() -> None:
    model = imported(GPT2)
    assert (model.ffn_hidden_size, model.position_embedding, model.tied_embeddings) == (3072, "learned_absolute", True)
    assert (model.vocab_size, model.padded_vocab_size) == (50257, 50304)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LLAMA, {"model_type": "lama"}, "unknown model_type 'lama'.*did you mean 'llama'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"rope_scaling": {"factor": 8}}, "rope_scaling"),
        (LLAMA, {"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "attention scores are scaled otherwise"),
        (GPT2, {"activation_function": "relu"}, "activation_function is 'relu'"),
    ],
)
def test_what_would_be_computed_differently_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(config, **changes)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing key 'n_embd' of a gpt2 configuration"):
        from_hugging_face({k: v for k, v in GPT2.items() if k != "n_embd"}, source="config.json")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2), encoding="utf-8")
    assert load_model(path) == imported(GPT2)


@pytest.mark.parametrize("path", sorted((ROOT / "scripts/presets/models").glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_load(path: Path) -> None:
    assert load_model(path).padded_vocab_size in (50304, 51200)
