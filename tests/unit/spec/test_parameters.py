"""The parameters of a model by name, and what each tensor-parallel rank holds of them."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.spec.model import ModelSpec
from hetero.spec.parameters import (
    EMBEDDING,
    HALF,
    Parameter,
    ShardInterval,
    parameters,
    shard_intervals,
    stage_parameters,
)
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.strategies import layer_cuts, models


def shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in parameters(model)}


def find(model: ModelSpec, name: str) -> Parameter:
    return next(parameter for parameter in parameters(model) if parameter.name == name)


def test_gpt2_by_name() -> None:
    """Hidden 32, ffn 64, 4 heads of 8: QKV has 3 x 32 rows. No output layer: the embedding serves twice."""
    layer = "decoder.layers.0"
    assert shapes(gpt2_model(num_layers=1)) == {
        "embedding.word_embeddings.weight": (64, 32),
        "embedding.position_embeddings.weight": (64, 32),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.input_layernorm.bias": (32,),
        f"{layer}.self_attention.linear_qkv.weight": (96, 32),
        f"{layer}.self_attention.linear_qkv.bias": (96,),
        f"{layer}.self_attention.linear_proj.weight": (32, 32),
        f"{layer}.self_attention.linear_proj.bias": (32,),
        f"{layer}.pre_mlp_layernorm.weight": (32,),
        f"{layer}.pre_mlp_layernorm.bias": (32,),
        f"{layer}.mlp.linear_fc1.weight": (64, 32),
        f"{layer}.mlp.linear_fc1.bias": (64,),
        f"{layer}.mlp.linear_fc2.weight": (32, 64),
        f"{layer}.mlp.linear_fc2.bias": (32,),
        "decoder.final_layernorm.weight": (32,),
        "decoder.final_layernorm.bias": (32,),
    }


def test_llama_by_name() -> None:
    """8 queries and 4 groups of size 4: QKV has 32 + 2 x 16 rows. Gate and up make fc1 twice as high."""
    layer = "decoder.layers.0"
    assert shapes(llama_model(num_layers=1)) == {
        "embedding.word_embeddings.weight": (64, 32),
        f"{layer}.input_layernorm.weight": (32,),
        f"{layer}.self_attention.linear_qkv.weight": (64, 32),
        f"{layer}.self_attention.linear_proj.weight": (32, 32),
        f"{layer}.pre_mlp_layernorm.weight": (32,),
        f"{layer}.mlp.linear_fc1.weight": (128, 32),
        f"{layer}.mlp.linear_fc2.weight": (32, 64),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (64, 32),
    }


def test_experts_by_name() -> None:
    mlp = "decoder.layers.0.mlp"
    found = shapes(moe_model(num_layers=1, num_experts=2))
    assert {name: shape for name, shape in found.items() if name.startswith(mlp)} == {
        f"{mlp}.router.weight": (2, 32),
        f"{mlp}.experts.local_experts.0.linear_fc1.weight": (96, 32),
        f"{mlp}.experts.local_experts.0.linear_fc2.weight": (32, 48),
        f"{mlp}.experts.local_experts.1.linear_fc1.weight": (96, 32),
        f"{mlp}.experts.local_experts.1.linear_fc2.weight": (32, 48),
    }


def test_gpt2_small_has_its_published_size() -> None:
    """124 439 808 parameters (openai/gpt-2, 12 layers, vocabulary not padded)."""
    gpt2_small = gpt2_model(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        ffn_hidden_size=3072,
        vocab_size=50257,
        padded_vocab_size=50257,
        max_position_embeddings=1024,
    )
    assert sum(parameter.numel for parameter in parameters(gpt2_small)) == 124_439_808


def test_llama_3_8b_has_its_published_size() -> None:
    """8 030 261 248 parameters (meta-llama/Meta-Llama-3-8B)."""
    llama_3_8b = llama_model(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=14336,
        vocab_size=128256,
        padded_vocab_size=128256,
    )
    assert sum(parameter.numel for parameter in parameters(llama_3_8b)) == 8_030_261_248


@given(models())
@settings(max_examples=20, deadline=None)
def test_names_are_unique_and_positions_follow_the_forward(model: ModelSpec) -> None:
    rows = parameters(model)
    assert max(Counter(parameter.name for parameter in rows).values()) == 1
    positions = [parameter.position for parameter in rows]
    assert positions == sorted(positions)
    layers = range(model.num_layers)
    assert set(positions) == {-1, *layers, *(layer + HALF for layer in layers), model.num_layers}


@given(models(), st.data())
@settings(max_examples=30, deadline=None)
def test_stages_hold_every_parameter_once_but_for_the_tied_embedding(model: ModelSpec, data: st.DataObject) -> None:
    cuts = data.draw(layer_cuts(model.num_layers))
    held = Counter(
        parameter.name
        for first, end in pairwise([0, *cuts, model.num_layers])
        for parameter in stage_parameters(model, first_layer=first, end_layer=end)
    )
    assert held.keys() == {parameter.name for parameter in parameters(model)}
    twice = {name for name, count in held.items() if count > 1}
    assert twice == ({EMBEDDING} if model.tied_embeddings and cuts else set())
    assert max(held.values()) <= 2


def test_the_last_stage_holds_the_tied_embedding_but_not_the_positions() -> None:
    last = {parameter.name for parameter in stage_parameters(gpt2_model(), first_layer=5, end_layer=6)}
    assert EMBEDDING in last
    assert "embedding.position_embeddings.weight" not in last


@pytest.mark.parametrize(
    ("name", "tp_rank", "intervals"),
    [
        ("self_attention.linear_qkv.weight", 0, [(0, 0, 32)]),
        ("self_attention.linear_qkv.weight", 1, [(32, 0, 32)]),
        ("self_attention.linear_proj.weight", 1, [(16, 0, 16)]),
        ("input_layernorm.weight", 1, [(0, 0, 1)]),
        # Rows 0 to 63 are the gate, 64 to 127 up: each rank holds half of both, one behind the other.
        ("mlp.linear_fc1.weight", 0, [(0, 0, 32), (64, 32, 32)]),
        ("mlp.linear_fc1.weight", 1, [(32, 0, 32), (96, 32, 32)]),
    ],
)
def test_shard_intervals_of_llama_at_tp_2(name: str, tp_rank: int, intervals: list[tuple[int, int, int]]) -> None:
    parameter = find(llama_model(), f"decoder.layers.0.{name}")
    assert shard_intervals(parameter, tp=2, tp_rank=tp_rank) == tuple(ShardInterval(*each) for each in intervals)


@given(models(), st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None)
def test_shards_cover_the_parameter_once_and_fill_the_local_tensor(model: ModelSpec, tp: int) -> None:
    for parameter in parameters(model):
        if parameter.shard_dim is None:
            assert parameter.local_shape(tp) == parameter.shape
            continue
        size, local_size = parameter.shape[parameter.shard_dim], parameter.local_shape(tp)[parameter.shard_dim]
        covered: Counter[int] = Counter()
        for t in range(tp):
            intervals = shard_intervals(parameter, tp=tp, tp_rank=t)
            covered.update(i for each in intervals for i in range(each.global_start, each.global_start + each.length))
            local = [i for each in intervals for i in range(each.local_start, each.local_start + each.length)]
            assert local == list(range(local_size))
        assert covered == Counter(range(size))


def test_who_holds_parts_of_a_gradient() -> None:
    """Sequence parallelism splits the activations of norms and of row-parallel biases; QK norms see own heads only."""
    model = gpt2_model(num_layers=1, qk_layernorm=True)
    partial = {parameter.name: parameter.partial_gradient for parameter in parameters(model)}
    layer = "decoder.layers.0"
    assert {name for name, when in partial.items() if when == "always"} == {
        f"{layer}.self_attention.{which}.{kind}"
        for which in ("q_layernorm", "k_layernorm")
        for kind in ("weight", "bias")
    }
    assert {name for name, when in partial.items() if when == "sequence_parallel"} == {
        f"{layer}.input_layernorm.weight",
        f"{layer}.input_layernorm.bias",
        f"{layer}.pre_mlp_layernorm.weight",
        f"{layer}.pre_mlp_layernorm.bias",
        f"{layer}.self_attention.linear_proj.bias",
        f"{layer}.mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
        "decoder.final_layernorm.bias",
    }


def test_who_starts_how_and_who_decays() -> None:
    model = gpt2_model(num_layers=1)
    layer = "decoder.layers.0"
    inits = {parameter.name: parameter.init for parameter in parameters(model)}
    assert inits[EMBEDDING] == inits[f"{layer}.mlp.linear_fc1.weight"] == "normal"
    assert inits[f"{layer}.mlp.linear_fc2.weight"] == inits[f"{layer}.self_attention.linear_proj.weight"]
    assert inits[f"{layer}.mlp.linear_fc2.weight"] == "scaled_normal"
    assert inits[f"{layer}.input_layernorm.weight"] == "ones"
    assert inits[f"{layer}.input_layernorm.bias"] == inits[f"{layer}.mlp.linear_fc1.bias"] == "zeros"
    assert all(
        parameter.decays == parameter.name.endswith("weight")
        for parameter in parameters(model)
        if "layernorm" not in parameter.name
    )
    assert not any(parameter.decays for parameter in parameters(model) if "layernorm" in parameter.name)
