"""Models that make sense, and models that do not."""

import json
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.serialization import from_json, to_json
from hetero.spec.model import ModelSpec, RotaryScaling, first_difference, padded_vocab_size
from tests.helpers.models import gpt2_model, llama_model, moe_model

LLAMA3: dict[str, Any] = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_families_are_legal() -> None:
    assert not gpt2_model().is_gated
    assert llama_model().is_gated
    assert moe_model().num_experts == 4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0, must be at least 1"),
        ({"vocab_size": -5}, "vocab_size is -5, must be at least 1"),
        ({"num_query_groups": 3}, "num_query_groups 3 does not divide num_attention_heads 8"),
        ({"padded_vocab_size": 60}, "padded_vocab_size 60 is below vocab_size 61"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon is 0\.0, must be above 0"),
        ({"rotary_percent": 0.0}, r"rotary_percent is 0\.0, must be above 0 and at most 1"),
        ({"rotary_percent": 1.5}, r"rotary_percent is 1\.5, must be above 0 and at most 1"),
        ({"rotary_base": 0.0}, r"rotary_base is 0\.0, must be above 0"),
        ({"linear_bias": True, "proj_bias": True}, "linear_bias gives the output of attention a bias already"),
        (
            {"position_embedding": "learned_absolute", "rotary_scaling": RotaryScaling(kind="linear", factor=2.0)},
            "rotary_scaling with position_embedding learned_absolute: only rope is scaled",
        ),
        ({"num_experts": 4}, "num_experts is set, so moe_ffn_hidden_size must be set"),
        ({"num_experts": 4, "moe_ffn_hidden_size": 16, "linear_bias": True}, "experts here have no biases"),
        (
            {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 5},
            "moe_router_topk 5 exceeds num_experts 4",
        ),
    ],
)
def test_nonsense_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llama_model(**overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "linear", "factor": 0.5}, r"factor is 0\.5, must be at least 1"),
        ({"kind": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "linear has nothing but a factor"),
        ({"kind": "llama3", "factor": 2.0, "low_freq_factor": 1.0}, "llama3 needs low_freq_factor, high_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, r"low_freq_factor is 1\.0 and high_freq_factor 1\.0"),
        (
            {**LLAMA3, "original_max_position_embeddings": 0},
            "original_max_position_embeddings is 0, must",
        ),
    ],
)
def test_nonsensical_scaling_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RotaryScaling(**fields)


def test_models_from_before_rotary_scaling_are_read() -> None:
    """Plans and checkpoints have whole bases, and know nothing of scaling and of a bias of attention's output."""
    stated = json.loads(to_json(llama_model()))
    for key in ("rotary_scaling", "proj_bias"):
        del stated[key]
    assert from_json(ModelSpec, json.dumps({**stated, "rotary_base": 10000}), source="a") == llama_model()
    scaled = llama_model(rotary_scaling=RotaryScaling(**LLAMA3), rotary_base=500_000.5)
    assert from_json(ModelSpec, to_json(scaled), source="a") == scaled


def test_booleans_are_no_numbers() -> None:
    """False is 0 to Python, but not below 1 here."""
    assert llama_model(qk_layernorm=False).qk_layernorm is False


def test_first_difference() -> None:
    assert first_difference(gpt2_model(), gpt2_model()) is None
    difference = first_difference(gpt2_model(num_layers=4, vocab_size=50), gpt2_model())
    assert difference == "num_layers 4, not 6", "the first field in order of declaration"


@pytest.mark.parametrize(("vocab_size", "padded"), [(1, 128), (128, 128), (129, 256), (50257, 50304)])
def test_padded_vocab_size(vocab_size: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, divisible_by=128) == padded
