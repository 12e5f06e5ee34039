"""What the parameters of a stage's modules are called in the whole model, and what they begin with."""

import math

import pytest
import torch

from hetero.runtime.named_parameters import _canonical_name, draw_weights
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model


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


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a whole model of eight layers that are wide enough to tell a deviation by."""
    model = gpt2_model(num_layers=8, hidden_size=64, kv_channels=16, ffn_hidden_size=128)
    held = {p.name: (p, torch.nn.Parameter(torch.empty(p.shape))) for p in parameters(model)}
    draw_weights(held, model=model, tp=1, tp_rank=0, seed=seed, std=0.1)
    return {name: tensor.detach() for name, (_, tensor) in held.items()}


def test_every_matrix_has_values_of_its_own_and_of_the_seed() -> None:
    ours, same, other = drawn(1), drawn(1), drawn(2)
    matrices = [name for name, weight in ours.items() if weight.dim() == 2]
    assert len(matrices) == 2 + 4 * 8
    assert len({float(ours[name].sum()) for name in matrices}) == len(matrices)
    for name, weight in ours.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, other[name]) == (name not in matrices), name


def test_projections_onto_the_residual_stream_begin_smaller_by_the_depth() -> None:
    """GPT-2: by sqrt(2 L), since two of them in each of L layers add up there."""
    for name, weight in drawn(1).items():
        if weight.dim() == 2:
            is_projection = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.1 / math.sqrt(2 * 8) if is_projection else 0.1
            assert float(weight.std()) == pytest.approx(expected, rel=0.06), name
