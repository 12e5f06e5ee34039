"""Attention of the local layers is right by whichever kernel torch takes for a shape and a precision on this device.

The kernel is recorded, so that the report of a run names it: which one a device takes differs between devices and
between versions of cuDNN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from hetero.runtime.attention import ScaledDotProductAttention, kernel_of
from tests.helpers.gpu_ranks import device_type_here, on_devices

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

BOUND = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Norm of the difference to float64 over the norm."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Samples, heads of queries, heads of keys and values, tokens, channels of a head."""

    samples: int
    heads: int
    groups: int
    tokens: int
    channels: int

    def __str__(self) -> str:
        return f"{self.samples}x{self.heads}of{self.groups}x{self.tokens}x{self.channels}"


SMALL = Shape(samples=2, heads=6, groups=2, tokens=32, channels=8)
SHAPES = (
    SMALL,
    Shape(samples=2, heads=4, groups=4, tokens=16, channels=8),
    Shape(samples=2, heads=4, groups=2, tokens=8, channels=32),
    Shape(samples=2, heads=4, groups=2, tokens=32, channels=32),
    Shape(samples=4, heads=16, groups=16, tokens=1024, channels=64),
    Shape(samples=1, heads=8, groups=8, tokens=1024, channels=128),
    Shape(samples=1, heads=32, groups=8, tokens=2048, channels=128),
)
CASES = [(precision, shape, dropout) for precision in PRECISIONS for shape in SHAPES for dropout in (0.0, 0.1)]
ON_CPU = [(precision, SMALL, 0.0) for precision in PRECISIONS]


def attention(shape: Shape, dropout: float) -> ScaledDotProductAttention:
    """Local layers' attention; tensor-parallel ranks cut the sequence, so that dropout draws from torch's generator."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.channels,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        attention_dropout=dropout,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    return ScaledDotProductAttention(config, attn_mask_type=AttnMaskType.causal, softmax_scale=None)


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention as its definition has it: [S, B, N, D] to [S, B, G, D] -> [S, B, N D]."""
    tokens, _, heads, channels = query.shape
    key, value = (each.repeat_interleave(heads // key.shape[2], dim=2) for each in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / channels**0.5
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def output_and_gradients(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], weights: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights.to(output.dtype))]


@pytest.mark.parametrize(("device", "case"), on_devices(CASES, on_cpu=ON_CPU))
def test_attention_is_right(
    device: str, case: tuple[str, Shape, float], record_property: Callable[[str, object], None]
) -> None:
    """Output and gradients, to float64. With dropout, whose mask is the kernel's own, they are finite."""
    precision, shape, dropout = case
    if device == "cuda" and precision not in device_type_here(device).precisions:
        pytest.skip(f"{device_type_here(device).name} has no {precision}")
    torch.manual_seed(0)
    inputs = [
        torch.randn(shape.tokens, shape.samples, heads, shape.channels, device=device, dtype=PRECISIONS[precision])
        for heads in (shape.heads, shape.groups, shape.groups)
    ]
    query, key, value = (each.detach().requires_grad_().permute(1, 2, 0, 3) for each in inputs)
    record_property("kernel", kernel_of(query, key, value, dropout=dropout).name.lower())
    weights = torch.randn(shape.tokens, shape.samples, shape.heads * shape.channels, device=device)
    found = output_and_gradients(attention(shape, dropout), inputs, weights)
    if dropout:
        assert all(torch.isfinite(each).all() for each in found)
        return
    expected = output_and_gradients(reference, [each.double() for each in inputs], weights)
    for name, ours, exact in zip(("output", "query", "key", "value"), found, expected, strict=True):
        far = float((ours.double() - exact).norm() / exact.norm())
        assert far < BOUND[precision], f"{name} is {far:.1e} from float64"
