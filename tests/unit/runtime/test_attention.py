"""Attention of the local layers computes what megatron-core's own does, and keeps no scores."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend

from hetero.runtime import cpu_backend
from hetero.runtime.attention import (
    KERNELS,
    ScaledDotProductAttention,
    attention_kernel,
    attention_that_ran,
    kernel_of,
)
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.options import StageOptions
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage

S, B, D = 48, 3, 16

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def config(heads: int = 4, groups: int = 4, **changes: object) -> TransformerConfig:
    fields = {"attention_dropout": 0.0, "sequence_parallel": False, "attention_backend": AttnBackend.auto, **changes}
    return TransformerConfig(
        num_layers=1,
        hidden_size=heads * D,
        num_attention_heads=heads,
        num_query_groups=groups,
        tensor_model_parallel_size=2 if fields["sequence_parallel"] else 1,
        **fields,
    )


def ours(made: TransformerConfig, *, softmax_scale: float | None = None) -> ScaledDotProductAttention:
    return ScaledDotProductAttention(made, attn_mask_type=AttnMaskType.causal, softmax_scale=softmax_scale)


def megatron_cores(made: TransformerConfig, *, softmax_scale: float | None = None) -> torch.nn.Module:
    return DotProductAttention(
        made,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=softmax_scale,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )


def heads_of(heads: int, groups: int, dtype: torch.dtype = torch.float64) -> Heads:
    """Queries, keys and values cut out of one product, as a layer has them."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(S, B, groups, heads // groups + 2, D, dtype=torch.float64, generator=generator).to(dtype)
    query, key, value = mixed.split([heads // groups, 1, 1], dim=3)
    leaves = (query.reshape(S, B, heads, D), key.reshape(S, B, groups, D), value[:, :, :, 0])
    return tuple(leaf.detach().requires_grad_() for leaf in leaves)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of megatron-core's tracker."""
    for owner in (torch.cuda, torch.cuda.random, megatron_random):
        for name in ("current_device", "set_device", "get_rng_state", "set_rng_state", "manual_seed"):
            if hasattr(owner, name):
                # What is set to itself is put back when the test is over.
                monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(megatron_random, "_set_cuda_rng_state", megatron_random._set_cuda_rng_state)
    cpu_backend.install()
    model_parallel_cuda_manual_seed(5, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
    # What megatron-core's attention writes its scores to.
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    state = SimpleNamespace(get_global_memory_buffer=lambda: buffer)
    monkeypatch.setattr(dot_product_attention, "parallel_state", state)


def results(attention: torch.nn.Module, inputs: Heads, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values."""
    output = attention(*inputs, mask)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("backend", list(AttnBackend), ids=lambda backend: backend.name)
def test_it_is_megatron_cores_attention(groups: int, scale: float | None, backend: AttnBackend) -> None:
    made = config(groups=groups, attention_backend=backend)
    hidden = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    theirs = results(megatron_cores(made, softmax_scale=scale), heads_of(4, groups), hidden)
    found = results(ours(made, softmax_scale=scale), heads_of(4, groups), None)
    for ours_, theirs_ in zip(found, theirs, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [4, 2])
def test_no_kernel_of_the_cpu_keeps_the_scores(dtype: torch.dtype, groups: int) -> None:
    """What is saved for the backward grows with the sequence, not with its square, and the output is no copy."""
    saved: list[torch.Size] = []
    inputs = heads_of(4, groups, dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape), lambda _: None):
        output = ours(config(groups=groups))(*inputs)
    assert saved
    assert max(shape.numel() for shape in saved) == S * B * 4 * D
    assert output.is_contiguous()
    heads = [each.permute(1, 2, 0, 3) for each in inputs]
    assert kernel_of(*heads, dropout=0.0) == SDPBackend.FLASH_ATTENTION


def test_unfused_attention_keeps_the_scores() -> None:
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each.shape), lambda _: None):
        ours(config(attention_backend=AttnBackend.unfused))(*heads_of(4, 4))
    assert max(shape.numel() for shape in saved) == B * 4 * S * S


def test_heads_are_copied_where_the_only_kernel_without_scores_knows_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a V100, played by a kernel choice that refuses groups."""
    inputs = heads_of(4, 2)
    expected = results(ours(config(groups=2)), inputs, None)
    choose, grouped = torch._fused_sdp_choice, []

    def choose_on_volta(*args: object, enable_gqa: bool, **options: object) -> int:
        grouped.append(enable_gqa)
        return int(SDPBackend.MATH.value) if enable_gqa else choose(*args, enable_gqa=enable_gqa, **options)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose_on_volta)
    shapes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        shapes.append((key.shape[1], value.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    found = results(ours(config(groups=2)), inputs, None)
    assert grouped == [True, False]
    assert shapes == [(4, 4, False)]
    for ours_, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_generator_of_megatron_core(sequence_parallel: bool) -> None:
    """From the tracker's where tensor-parallel ranks have unlike heads and like rows, else from the default one."""
    attention = ours(config(attention_dropout=0.5, sequence_parallel=sequence_parallel))
    tracked, default = get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone(), torch.get_rng_state()
    dropped = attention(*heads_of(4, 4))
    moved = not torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], tracked)
    assert moved == (not sequence_parallel)
    assert torch.equal(torch.get_rng_state(), default) == (not sequence_parallel)
    attention.eval()
    assert not torch.equal(attention(*heads_of(4, 4)), dropped)


def test_dropout_drops_what_megatron_core_drops() -> None:
    """The same generator gives the same output: the share of weights that is dropped, and their scale, are its."""
    made = config(attention_dropout=0.3)
    hidden = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    state = get_cuda_rng_tracker().get_states()
    kept = {name: each.clone() for name, each in state.items()}
    theirs = results(megatron_cores(made), heads_of(4, 4), hidden)
    get_cuda_rng_tracker().set_states(kept)
    for ours_, theirs_ in zip(results(ours(made), heads_of(4, 4), None), theirs, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-12, atol=1e-12)


def test_it_is_computed_again_with_the_same_dropout() -> None:
    """megatron-core's selective recompute wraps the core attention in this."""
    attention = ours(config(attention_dropout=0.3))
    kept = {name: each.clone() for name, each in get_cuda_rng_tracker().get_states().items()}
    whole = results(attention, heads_of(4, 4), None)
    get_cuda_rng_tracker().set_states(kept)
    inputs = heads_of(4, 4)
    output = checkpoint(attention, False, *inputs, None)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    for again, once in zip([output, *(each.grad for each in inputs)], whole, strict=True):
        torch.testing.assert_close(again, once, rtol=0, atol=0)


def test_a_log_names_the_kernel_of_the_heads_that_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: cuDNN's from 64 tokens on, with a backward, and with dropout in sixteenths; else the efficient one."""
    model = llama_model(num_attention_heads=8, num_query_groups=4, kv_channels=16, hidden_size=128)
    whole = plan(model, [replica(stage(layers=(0, 4), ranks=(0, 1), tp=2, mbs=3), num_samples=3)], seq_length=96)
    asked: list[tuple[torch.Tensor, ...]] = []

    def choose(*heads: object, **_: object) -> int:
        query, key, value, _mask, dropout = heads[:5]
        assert isinstance(query, torch.Tensor)
        assert isinstance(key, torch.Tensor)
        assert isinstance(value, torch.Tensor)
        asked.append((query, key, value))
        trains = query.requires_grad and key.requires_grad and value.requires_grad and torch.is_grad_enabled()
        fits = query.shape[2] >= 64 and trains and float(str(dropout)) * 16 % 1 == 0
        return int((SDPBackend.CUDNN_ATTENTION if fits else SDPBackend.EFFICIENT_ATTENTION).value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    for dropout, kernel in ((0.125, "torch cudnn_attention"), (0.1, "torch efficient_attention")):
        named = attention_kernel(
            whole,
            whole.replicas[0].stages[0],
            StageOptions(attention_dropout=dropout),
            LayerChoice(transformer_engine=None),
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
        )
        assert named == kernel
    query, key, value = asked[0]
    assert (query.shape, key.shape, value.shape) == ((3, 4, 96, 16), (3, 2, 96, 16), (3, 2, 96, 16))
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    # The queries are a tensor of their own, the values a cut of the product that all three come from.
    assert query.stride() == (4 * 16, 16, 3 * 4 * 16, 1)
    assert value.stride()[2:] == (3 * 2 * (2 + 2) * 16, 1)


@pytest.mark.parametrize(
    ("dropout", "backend", "kernel"),
    [(0.0, "auto", "flash"), (0.0, "unfused", "unfused"), (0.1, "auto", "unfused")],
)
def test_a_profile_names_the_kernel_that_ran(dropout: float, backend: str, kernel: str) -> None:
    attention = ours(config(attention_dropout=dropout, attention_backend=AttnBackend[backend]))
    layer = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "attention": attention})
    assert attention_that_ran(layer) is None, "nothing has run"
    attention(*heads_of(4, 4))
    assert attention_that_ran(layer) == kernel
    assert attention_that_ran(layer["norm"]) is None


@pytest.mark.parametrize(
    ("chosen", "kernel"),
    [
        ({"use_flash_attention": False, "use_fused_attention": True, "use_unfused_attention": False}, "cudnn"),
        ({"use_flash_attention": True, "use_fused_attention": False, "use_unfused_attention": False}, "flash"),
        ({"use_flash_attention": False, "use_fused_attention": False, "use_unfused_attention": True}, "fused-softmax"),
        ({"use_flash_attention": None, "use_fused_attention": None, "use_unfused_attention": None}, None),
    ],
)
def test_transformer_engine_is_asked_what_it_has_chosen(
    chosen: dict[str, bool | None], kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are subclassed by megatron-core."""
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    module = ModuleType(name)
    vars(module)["_attention_backends"] = chosen
    monkeypatch.setitem(sys.modules, name, module)
    theirs = type("DotProductAttention", (torch.nn.Module,), {"__module__": name})
    assert attention_that_ran(torch.nn.Sequential(type("TEDotProductAttention", (theirs,), {})())) == kernel


def test_every_backend_of_megatron_lm_has_its_kernels() -> None:
    assert set(KERNELS) | {AttnBackend.auto, AttnBackend.local} == set(AttnBackend)
    assert all(order[-1] == SDPBackend.MATH for order in KERNELS.values()), "a device without the others can train"


def test_megatron_cores_softmax_kernel_is_never_asked_for() -> None:
    """It is an extension of apex's kind that nobody builds; megatron-core imports it in the first forward."""
    for dtype in (torch.float16, torch.bfloat16):
        half = config(fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16)
        results(ours(half), heads_of(4, 4, dtype), None)
    assert not [name for name in sys.modules if name.startswith("scaled_") and name.endswith("softmax_cuda")]
