"""How much work a layer is, against counts made another way."""

import pytest

from hetero.cost.layers.work import layer_work, parameters_of
from hetero.data import shipped_profiles
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from hetero.spec.profile import LAYER_KINDS, LayerShape, ModuleKind, Profile
from tests.helpers.models import gpt2_model, llama_model, moe_model

PARTS: dict[ModuleKind, tuple[float, ...]] = {"attention": (0,), "mlp": (0.5,), "block": (0, 0.5)}


def test_a_block_of_gpt3_does_24_b_s_h_h_and_4_b_s_s_h_operations() -> None:
    """arXiv 2104.04473: 24 B s h^2 + 4 B s^2 h per layer and forward."""
    b, s, h = 3, 128, 64
    shape = LayerShape.of(gpt2_model(hidden_size=h, kv_channels=16, ffn_hidden_size=4 * h))
    work = layer_work("block", shape, tp=1, micro_batch_size=b, seq_length=s, element_bytes=4)
    assert work.operations == 24 * b * s * h * h + 4 * b * s * s * h
    assert work.attention_operations == 4 * b * s * s * h
    assert work.score_bytes == 4 * b * 4 * s * s


def test_tensor_parallelism_divides_the_products() -> None:
    shape = LayerShape.of(gpt2_model())
    alone = layer_work("block", shape, tp=1, micro_batch_size=1, seq_length=16, element_bytes=4)
    four = layer_work("block", shape, tp=4, micro_batch_size=1, seq_length=16, element_bytes=4)
    assert four.operations == alone.operations / 4
    assert alone.row_bytes / 4 < four.row_bytes < alone.row_bytes, "norms and residuals are repeated"


@pytest.mark.parametrize("model", [gpt2_model(), llama_model(), moe_model()], ids=["gpt2", "llama", "moe"])
@pytest.mark.parametrize("tp", [1, 4])
def test_attention_and_mlp_are_a_block(model: ModelSpec, tp: int) -> None:
    attention, mlp, block = (
        layer_work(part, LayerShape.of(model), tp=tp, micro_batch_size=2, seq_length=16, element_bytes=4)
        for part in PARTS
    )
    for name in ("operations", "attention_operations", "score_bytes", "row_bytes"):
        assert getattr(attention, name) + getattr(mlp, name) == getattr(block, name), name
    assert mlp.attention_operations == mlp.score_bytes == 0


def test_the_mlp_of_gpt3_is_two_thirds_of_its_weights() -> None:
    shape = LayerShape.of(gpt2_model(hidden_size=64, kv_channels=16, ffn_hidden_size=256))
    attention, mlp, _ = (
        layer_work(part, shape, tp=1, micro_batch_size=1, seq_length=16, element_bytes=4) for part in PARTS
    )
    assert mlp.operations == 2 * (attention.operations - attention.attention_operations)


def test_a_token_meets_only_the_experts_it_is_sent_to() -> None:
    two = LayerShape.of(moe_model(moe_router_topk=2))
    one = LayerShape.of(moe_model(moe_router_topk=1))
    works = [layer_work("block", s, tp=1, micro_batch_size=1, seq_length=16, element_bytes=4) for s in (one, two)]
    expert = 2 * 16 * 3 * 32 * 48
    assert works[1].operations - works[0].operations == expert


def test_a_head_multiplies_by_the_vocabulary() -> None:
    shape = LayerShape.of(gpt2_model())
    work = layer_work("head", shape, tp=2, micro_batch_size=1, seq_length=16, element_bytes=4)
    assert work.operations == 2 * 16 * 32 * 64 / 2
    assert work.score_bytes == 4 * 16 * 64 / 2


@pytest.mark.parametrize("model", [gpt2_model(), llama_model(), moe_model()], ids=["gpt2", "llama", "moe"])
def test_parameters_of_a_block_are_nearly_those_of_the_model(model: ModelSpec) -> None:
    """Nearly: biases and norms are counted as if every model had GPT-2's."""
    for part, positions in PARTS.items():
        exact = sum(p.numel for p in parameters(model) if p.position in positions)
        assert parameters_of(part, LayerShape.of(model), tp=1) == pytest.approx(exact, rel=0.07)


@pytest.mark.parametrize("profile", list(shipped_profiles()), ids=lambda profile: f"{profile.model} {profile.device}")
def test_parameters_are_those_that_were_measured(profile: Profile) -> None:
    """But for rows that the measurer padded the vocabulary with, more of them at higher tp."""
    for kind in LAYER_KINDS:
        for memory in profile.memory:
            if memory.kind == kind and (kind != "head" or profile.head_has_projection):
                counted = parameters_of(kind, profile.shape, tp=memory.tp)
                # All of these models have learned embeddings of 2048 positions.
                counted += 2048 * profile.shape.hidden if kind == "embedding" else 0
                assert counted == pytest.approx(memory.parameters, rel=0.02)
