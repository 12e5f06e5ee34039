"""Whose layers and which kernels a stage gets, by device, precision, flags and what is installed."""

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.enums import AttnBackend

from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.runtime import layer_choice, main_grad, mcore
from hetero.runtime.layer_choice import (
    ATTENTION_VARIABLES,
    LayerChoice,
    check_attention_variables,
    choices_of,
    choose_layers,
    may_split_backward,
)
from hetero.runtime.options import StageOptions
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, stage

CUDA = torch.device("cuda", 0)
ACCUMULATION = "gradient accumulation"
WIDE = {"hidden_size": 64, "kv_channels": 16, "ffn_hidden_size": 128}


def made(model: Any = None, *, precision: str = "bf16", device: str = "A100-40", **fields: Any) -> Plan:
    one = stage(layers=(0, 6), ranks=(0,), device=device)
    one = dataclasses.replace(one, **fields)
    whole = plan_of(model or llama_model(**WIDE), [replica(one, num_samples=4)])
    return dataclasses.replace(whole, precision=precision)


def chosen(plan: Plan, *, on: torch.device = CUDA, **options: Any) -> LayerChoice:
    return choose_layers(plan, plan.replicas[0].stages[0], StageOptions(**options), device=on)


def of_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(layer_choice, "get_te_version", lambda: version)
    numbers = [int(part) for part in version.split(".")]
    monkeypatch.setattr(layer_choice, "is_te_min_version", lambda least: numbers >= list(map(int, least.split("."))))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine, no Apex, and on CUDA a torch that multiplies halves into a float32 sum."""
    monkeypatch.setattr(main_grad, "_has_mixed_product", lambda dtype, device: device.type == "cuda")
    monkeypatch.setattr(layer_choice, "HAVE_TE", True)
    of_version(monkeypatch, "2.11.0")
    monkeypatch.setattr(layer_choice, "HAVE_FUSED_LAYER_NORM", False)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("delay", [None, 2])
def test_transformer_engine_where_it_can(precision: str, delay: int | None) -> None:
    found = chosen(made(precision=precision, wgrad_delay=delay))
    assert (found.transformer_engine, found.torch_attention) == ("2.11.0", False)
    assert found.layers == "TransformerEngine 2.11.0"


@pytest.mark.parametrize(
    ("plan", "why", "fix"),
    [
        (made(precision="fp32"), "TransformerEngine does not compute in fp32", "add --bf16 or --fp16, or choose auto"),
        (made(precision="fp64"), "TransformerEngine does not compute in fp64", "add --bf16 or --fp16, or choose auto"),
        (made(device="V100-16", precision="fp16"), "TransformerEngine does not run on V100-16", "choose auto"),
    ],
)
def test_local_layers_elsewhere_and_an_error_where_it_is_asked_for(plan: Plan, why: str, fix: str) -> None:
    found = chosen(plan)
    assert (found.transformer_engine, found.torch_attention, found.why_local) == (None, True, why)
    with pytest.raises(ConfigError, match=f"^--transformer-impl transformer_engine: {why}; {fix}, which takes"):
        chosen(plan, transformer_impl="transformer_engine")


def test_an_emulated_device_gets_local_layers() -> None:
    """The plan names the device that is played, and the CPU computes."""
    found = chosen(made(), on=torch.device("cpu"))
    assert found.why_local == "TransformerEngine does not run on cpu"
    assert found.fused == ()


def test_transformer_engine_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    of_version(monkeypatch, "2.2.0")
    assert chosen(made()).transformer_engine == "2.2.0"
    delayed = made(wgrad_delay=0)
    assert chosen(delayed).layers.startswith("local (TransformerEngine 2.2.0 cannot delay weight gradients")
    with pytest.raises(
        ConfigError, match=r"install 2\.3\.0 or newer, set wgrad_delay to null in the plan, or choose auto"
    ):
        chosen(delayed, transformer_impl="transformer_engine")
    assert not may_split_backward(StageOptions())
    assert may_split_backward(StageOptions(transformer_impl="local"))
    monkeypatch.setattr(layer_choice, "HAVE_TE", False)
    assert chosen(made()).layers == "local (TransformerEngine is not installed)"
    with pytest.raises(
        ConfigError, match=r"is not installed; run: pip install 'megatron-hetero\[transformer-engine\]'"
    ):
        chosen(made(), transformer_impl="transformer_engine")
    assert may_split_backward(StageOptions())


def test_a_planner_may_split_backwards_beside_todays_transformer_engine() -> None:
    assert may_split_backward(StageOptions())


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, ("bias + activation", "bias + dropout", "rope", ACCUMULATION)),
        ({"bias_swiglu_fusion": False}, ("bias + dropout", "rope", ACCUMULATION)),
        ({"bias_gelu_fusion": False}, ("bias + activation", "bias + dropout", "rope", ACCUMULATION)),
        ({"bias_dropout_fusion": False}, ("bias + activation", "rope", ACCUMULATION)),
        ({"rope_fusion": False}, ("bias + activation", "bias + dropout", ACCUMULATION)),
        ({"gradient_accumulation_fusion": False}, ("bias + activation", "bias + dropout", "rope")),
        ({"transformer_impl": "local"}, ("bias + activation", "bias + dropout", ACCUMULATION)),
        (
            {"cross_entropy_loss_fusion": True},
            ("bias + activation", "bias + dropout", "rope", "cross entropy", ACCUMULATION),
        ),
    ],
)
def test_fused_kernels_by_flag(options: dict[str, Any], fused: tuple[str, ...]) -> None:
    assert chosen(made(), **options).fused == fused
    assert chosen(made(), on=torch.device("cpu"), cross_entropy_loss_fusion=False).fused == ()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp64"])
def test_local_layers_add_up_gradients_by_torchs_product(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, half = made(precision=precision), precision in ("bf16", "fp16")
    assert chosen(plan, transformer_impl="local").gradient_accumulation
    assert chosen(plan, on=torch.device("cpu")).gradient_accumulation == (not half), "no such product on a CPU"
    assert not chosen(plan, transformer_impl="local", gradient_accumulation_fusion=False).gradient_accumulation
    monkeypatch.setattr(main_grad, "_has_mixed_product", lambda dtype, device: False)
    assert chosen(plan, transformer_impl="local").gradient_accumulation == (not half), "torch 2.9"


def test_apex_adds_up_gradients_of_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA alone, whatever torch can."""
    monkeypatch.setattr(main_grad, "_has_mixed_product", lambda dtype, device: False)
    monkeypatch.setattr(mcore, "_APEX_EXTENSION", SimpleNamespace(wgrad_gemm_accum_fp32=lambda *_: None))
    assert chosen(made(), transformer_impl="local").gradient_accumulation
    assert not chosen(made(), on=torch.device("cpu")).gradient_accumulation


def test_gelu_and_positions_that_are_learned() -> None:
    gpt2 = made(gpt2_model())
    assert chosen(gpt2).fused == ("bias + activation", "bias + dropout", ACCUMULATION)
    assert chosen(gpt2, bias_gelu_fusion=False).fused == ("bias + dropout", ACCUMULATION)
    assert chosen(gpt2, bias_swiglu_fusion=False).fused == ("bias + activation", "bias + dropout", ACCUMULATION)


def test_relu_has_no_fused_kernel() -> None:
    assert chosen(made(gpt2_model(activation="relu"))).fused == ("bias + dropout", ACCUMULATION)


def test_apex_normalizes_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_choice, "HAVE_FUSED_LAYER_NORM", True)
    layer_norm, local = made(gpt2_model(), precision="fp16"), {"transformer_impl": "local"}
    assert chosen(layer_norm, **local).apex_norm
    assert not chosen(layer_norm).apex_norm, "TransformerEngine has norms of its own"
    assert not chosen(made(precision="fp16"), **local).apex_norm, "there it knows LayerNorm alone"
    assert not chosen(dataclasses.replace(layer_norm, precision="fp64"), **local).apex_norm
    assert not chosen(layer_norm, on=torch.device("cpu"), **local).apex_norm


def test_torchs_attention_in_transformer_engines_layers() -> None:
    found = chosen(made(), attention_backend="local")
    assert (found.transformer_engine, found.torch_attention) == ("2.11.0", True)
    assert not chosen(made(), attention_backend="flash").torch_attention


def test_a_fused_loss_needs_a_plan_in_bf16() -> None:
    assert chosen(made(), cross_entropy_loss_fusion=True).cross_entropy
    with pytest.raises(ConfigError, match="rounds its gradient to bf16, and the plan is in fp16; leave it out"):
        chosen(made(precision="fp16"), cross_entropy_loss_fusion=True)


def test_fp8_of_the_stages_that_the_plan_says() -> None:
    hopper = made(device="H100", fp8=True)
    assert chosen(hopper).fp8 == ("hybrid", "delayed")
    assert chosen(hopper, fp8_format="e4m3", fp8_recipe="tensorwise").fp8 == ("e4m3", "tensorwise")
    assert chosen(hopper).layers == "TransformerEngine 2.11.0, fp8 hybrid delayed"
    assert chosen(made(device="H100")).fp8 is None


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (made(fp8=True), {}, "needs compute capability 8.9, the device has 8.0; choose another recipe, or set fp8"),
        (made(fp8=True, device="H100"), {"fp8_recipe": "mxfp8"}, "needs compute capability 10.0, the device has 9.0"),
        (made(fp8=True, device="H100", precision="fp16"), {}, "the plan's precision is fp16, fp8 goes with bf16"),
        (made(fp8=True, device="H100"), {"transformer_impl": "local"}, r"would be local \(--transformer-impl local\)"),
        (made(moe_model(), fp8=True, device="H100"), {}, "the model has experts, whose tokens come in any number"),
        (
            made(llama_model(), fp8=True, device="H100"),
            {"fp8_recipe": "blockwise"},
            "blockwise, a rank has 16 tokens of a microbatch, which must be a multiple of 128",
        ),
    ],
)
def test_fp8_that_cannot_be(plan: Plan, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(plan, **options)


def context(plan: Plan, *indices: int) -> Any:
    """What is asked of a rank that holds the stages with these indices."""
    stages = [SimpleNamespace(stage=plan.replicas[0].stages[s]) for s in indices]
    return SimpleNamespace(plan=plan, stages=stages, device=CUDA)


def test_a_rank_chooses_for_each_of_its_stages() -> None:
    two = (
        stage(layers=(0, 3), ranks=(0,), device="A100-40", delay=0),
        stage(layers=(3, 6), ranks=(1,), device="V100-16"),
    )
    plan = dataclasses.replace(plan_of(llama_model(), [replica(*two, num_samples=4)]), precision="fp16")
    found = choices_of(context(plan, 0, 1), StageOptions())
    assert [each.transformer_engine for each in found] == ["2.11.0", None]
    assert choices_of(context(plan), StageOptions()) == []


def test_a_format_for_fp8_without_any_stage_in_it() -> None:
    with pytest.raises(ConfigError, match="--fp8-format e4m3 has no effect: no stage of the plan is in fp8"):
        choices_of(context(made(device="H100"), 0), StageOptions(fp8_format="e4m3"))
    in_fp8 = made(device="H100", fp8=True)
    assert choices_of(context(in_fp8, 0), StageOptions(fp8_format="e4m3"))[0].fp8 == ("e4m3", "delayed")


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
def test_variables_that_contradict_the_flag(backend: Any) -> None:
    """megatron-core would assert that there are none, on each rank for itself."""
    options, wanted = StageOptions(attention_backend=backend), ATTENTION_VARIABLES[backend]
    check_attention_variables(options, {})
    check_attention_variables(options, {"NVTE_FUSED_ATTN": wanted[1]})
    other = "0" if wanted[1] == "1" else "1"
    with pytest.raises(ConfigError, match=f"NVTE_FUSED_ATTN is {other}, and --attention-backend {backend} sets it to"):
        check_attention_variables(options, {"NVTE_FUSED_ATTN": other})


def test_they_are_what_megatron_core_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, wanted in ATTENTION_VARIABLES.items():
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            monkeypatch.delenv(name, raising=False)
        config = SimpleNamespace(attention_backend=AttnBackend[backend], flash_attention_version=None)
        LanguageModule._set_attention_backend(SimpleNamespace(config=config))
        found = tuple(os.environ[name] for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"))
        assert found == wanted, backend
