"""Which modules the layers of a stage get, halves included."""

import pytest
import torch
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from hetero.plan.ir import Stage
from hetero.runtime import layer_spec
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.layer_spec import stage_spec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import stage

ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
PLACEHOLDERS = {"self_attn_bda": IdentityFuncOp, "mlp_bda": IdentityFuncOp}


LOCAL = LayerChoice(transformer_engine=None)


def halves(held: Stage, choice: LayerChoice = LOCAL) -> list[str]:
    """What the layers of ``held`` have: ``attention``, ``mlp``, or both. What they lack is the identity."""
    found = []
    for each in stage_spec(llama_model(), held, choice).layer_specs:
        parts = []
        for name, fields in (("attention", ATTENTION), ("mlp", MLP)):
            modules = {field: getattr(each.submodules, field) for field in fields}
            if modules != {field: PLACEHOLDERS.get(field, IdentityOp) for field in fields}:
                parts.append(name)
        found.append(" + ".join(parts))
    return found


@pytest.fixture(params=[None, "2.11"], ids=["local", "transformer_engine"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayerChoice:
    """Whose the layers are; TransformerEngine's are stood in for, with their norms inside other modules."""

    class Fused(torch.nn.Module):
        pass

    parts = SelfAttentionSubmodules(linear_qkv=Fused, core_attention=Fused, linear_proj=Fused)
    attention = ModuleSpec(module=Fused, submodules=parts)
    submodules = TransformerLayerSubmodules(self_attention=attention, self_attn_bda=Fused, mlp=Fused, mlp_bda=Fused)
    fused = ModuleSpec(module=TransformerLayer, submodules=submodules)
    monkeypatch.setattr(layer_spec, "get_gpt_layer_with_transformer_engine_spec", lambda **_: fused)
    return LayerChoice(transformer_engine=request.param)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((0, 2), ["attention + mlp"] * 2),
        ((0, 2.5), ["attention + mlp", "attention + mlp", "attention"]),
        ((2.5, 4), ["mlp", "attention + mlp"]),
        ((2.5, 3.5), ["mlp", "attention"]),
        ((2.5, 3), ["mlp"]),
        ((3, 3.5), ["attention"]),
    ],
)
def test_a_stage_has_the_halves_of_its_plan(
    layers: tuple[float, float], expected: list[str], choice: LayerChoice
) -> None:
    assert halves(stage(layers=layers, ranks=(0,)), choice) == expected


@pytest.mark.parametrize("model", [gpt2_model(), llama_model(qk_layernorm=True), moe_model()])
def test_a_half_has_what_the_whole_layer_has_there(model: object) -> None:
    whole, attention = stage_spec(model, stage(layers=(0, 1.5), ranks=(0,)), LOCAL).layer_specs
    (mlp,) = stage_spec(model, stage(layers=(1.5, 2), ranks=(0,)), LOCAL).layer_specs
    for half, fields in ((attention, ATTENTION), (mlp, MLP)):
        for field in fields:
            ours, theirs = (getattr(each.submodules, field) for each in (half, whole))
            assert str(ours) == str(theirs), field


@pytest.mark.parametrize("delay", [None, 0])
def test_a_bias_of_attentions_output_alone(delay: int | None) -> None:
    """Asked for by the layer itself: megatron-core has one setting for this layer and for the MLP."""
    biased = llama_model(qkv_bias=True, proj_bias=True)
    [layer] = stage_spec(biased, stage(layers=(0, 1), ranks=(0,), delay=delay), LOCAL).layer_specs
    [plain] = stage_spec(llama_model(), stage(layers=(0, 1), ranks=(0,), delay=delay), LOCAL).layer_specs
    linear, base = (each.submodules.self_attention.submodules.linear_proj for each in (layer, plain))
    assert linear.__bases__ == (base,)
    assert str(layer.submodules.mlp) == str(plain.submodules.mlp)
