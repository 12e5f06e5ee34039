"""Stands in for apex's extension that multiplies and adds up the gradient of a weight, on the CPU.

The extension alone: megatron-core's layers, its protocol of ``main_grad`` and this runtime are the real ones.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from hetero.runtime import main_grad


class WeightGradientKernel:
    """Computes what ``fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32`` does, with as little patience.

    calls: by the shape of the weight.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._dtype = dtype

    def __call__(self, rows: torch.Tensor, output_gradient: torch.Tensor, summed: torch.Tensor) -> None:
        assert rows.dim() == output_gradient.dim() == 2
        assert rows.is_contiguous()
        assert output_gradient.is_contiguous()
        assert summed.is_contiguous()
        assert summed.dtype == self._dtype
        summed.add_(output_gradient.t() @ rows)
        self.calls.append(tuple(summed.shape))


class _TorchOf:
    """torch, as megatron-core's linear layers see it: another precision for float32, and NaN in empty tensors.

    Their kernel sums in float32 alone, and the difference of two summations would hide whatever else is wrong.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.float32 = dtype

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options).fill_(torch.nan)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def fused_kernels(dtype: torch.dtype) -> Iterator[WeightGradientKernel]:
    """Let gradients that are summed in ``dtype`` be added up by the extension, as if it were installed."""
    kernel = WeightGradientKernel(dtype)
    extension = SimpleNamespace(wgrad_gemm_accum_fp32=kernel)
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", extension, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "torch", _TorchOf(dtype)),
        mock.patch.object(main_grad, "_FUSED_DTYPE", dtype),
    ):
        yield kernel
