"""What the parameters of a stage's modules are called in the whole model."""

import pytest

from hetero.runtime.named_parameters import _canonical_name


@pytest.mark.parametrize(
    ("local", "canonical"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.3.mlp.linear_fc1.weight"),
        ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_bias", "decoder.layers.4.input_layernorm.bias"),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight2",
            "decoder.layers.3.mlp.experts.local_experts.2.linear_fc2.weight",
        ),
    ],
)
def test_names_of_a_stage_that_starts_with_the_mlp_of_layer_3(local: str, canonical: str) -> None:
    """Of either layer spec: TransformerEngine's first linear layer has the norm of the half in it."""
    assert _canonical_name(local, first_layer=3, tied=False) == canonical
