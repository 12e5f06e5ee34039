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
    assert load_model(path).padded_vocab_size == 50304
