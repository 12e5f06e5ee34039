"""Launches of a layer: what adds up, and what decides them."""

import dataclasses
from typing import Any

import pytest

from hetero.cost.layers.launches import LAUNCH_S, counted_launches_s, num_launches
from hetero.cost.layers.layer_kernels import ComputePass, LayerConfig
from hetero.spec.model import ModelSpec
from hetero.spec.profile import GradientSums, LayerImplementation, LayerShape, ModuleKind
from tests.helpers.models import gpt2_model, llama_model, moe_model

PASSES: tuple[ComputePass, ...] = ("forward", "backward")
MODELS = pytest.mark.parametrize("model", [gpt2_model(), llama_model(), moe_model()], ids=["gpt2", "llama", "moe"])


def layer(model: ModelSpec, kind: ModuleKind, sums: GradientSums | None = "fused", **changes: Any) -> LayerConfig:
    return LayerConfig(
        **{
            "kind": kind,
            "shape": LayerShape.of(model),
            "seq_length": 16,
            "element_bytes": 2,
            "implementation": LayerImplementation(attention="flash", gradient_sums=sums),
            "tp": 1,
            "micro_batch_size": 1,
            **changes,
        }
    )


@MODELS
@pytest.mark.parametrize("compute_pass", PASSES)
@pytest.mark.parametrize("sums", [None, "separate", "fused"])
def test_halves_add_up_to_a_block(model: ModelSpec, compute_pass: ComputePass, sums: GradientSums | None) -> None:
    attention, mlp, block = (
        num_launches(layer(model, kind, sums), compute_pass) for kind in ("attention", "mlp", "block")
    )
    assert attention + mlp == block > 0


@MODELS
def test_a_pass_of_its_own_is_a_launch_for_each_weight(model: ModelSpec) -> None:
    experts = model.num_experts or 1
    for kind, weights in (("attention", 2), ("mlp", 2 * experts), ("head", 1)):
        separate, fused = (num_launches(layer(model, kind, sums), "backward") for sums in ("separate", "fused"))
        assert separate - fused == weights
        assert num_launches(layer(model, kind, "separate"), "forward") == num_launches(layer(model, kind), "forward")


def test_each_expert_has_launches_of_its_own() -> None:
    def of(num_experts: int) -> int:
        shape = dataclasses.replace(LayerShape.of(moe_model()), num_experts=num_experts)
        return num_launches(layer(moe_model(), "mlp", shape=shape), "forward")

    assert of(8) - of(4) == 4 * (of(5) - of(4)) == 4 * 3


def test_seconds_do_not_depend_on_the_tokens() -> None:
    few, many = (layer(llama_model(), "block", micro_batch_size=size) for size in (1, 64))
    assert counted_launches_s(few, "forward") == counted_launches_s(many, "forward") == 35 * LAUNCH_S
