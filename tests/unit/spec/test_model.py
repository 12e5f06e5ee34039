"""Models that make sense, and models that do not."""

from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.spec.model import first_difference, padded_vocab_size
from tests.helpers.models import gpt2_model, llama_model, moe_model


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
