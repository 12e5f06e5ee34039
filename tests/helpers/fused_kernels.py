"""Stands in for products that add a weight's gradient to its sum, and that no CPU has.

megatron-core's layers, its protocol of ``main_grad`` and this runtime are the real ones.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from hetero.runtime import main_grad, mcore


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


class MixedProduct:
    """Computes what ``torch.addmm`` with ``out_dtype`` does on CUDA, with its checks, as no CPU does.

    The checks are those of torch 2.10 and newer (ATen/native/cuda/Blas.cpp, ``_addmm_dtype_out_cuda``); 2.9 also asks
    that the sum has the dtype of the factors.

    calls: by the shape of the sum.
    """

    def __init__(self, *, refuses_other_sums: bool) -> None:
        self.calls: list[tuple[int, ...]] = []
        self._refuses_other_sums = refuses_other_sums

    def __call__(
        self,
        summed: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out: torch.Tensor,
    ) -> torch.Tensor:
        allowed = {left.dtype} if self._refuses_other_sums else {left.dtype, out_dtype}
        for is_right, message in (
            (left.dim() == right.dim() == 2, "matrices"),
            (left.shape[1] == right.shape[0], "shapes cannot be multiplied"),
            (left.dtype == right.dtype, "mat1 and mat2 must have the same dtype"),
            (out_dtype == left.dtype or (out_dtype == torch.float32 and left.dtype.itemsize == 2), "out_dtype"),
            (out.dtype == out_dtype, "out_dtype must be the dtype of out"),
            (summed.dtype in allowed, "self dtype"),
            (out.shape == (left.shape[0], right.shape[1]), "out would be resized"),
        ):
            if not is_right:
                raise RuntimeError(message)
        # Halves are multiplied exactly, and summed in float32.
        out.copy_(summed.to(out_dtype) + left.to(out_dtype) @ right.to(out_dtype))
        self.calls.append(tuple(out.shape))
        return out


class _TorchWithoutContents:
    """torch, as megatron-core's linear layers see it: NaN in empty tensors, which they leave to autograd."""

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options).fill_(torch.nan)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def apex_kernel(dtype: torch.dtype) -> Iterator[WeightGradientKernel]:
    """Let gradients that are summed in ``dtype`` be added up by apex's extension, as if it were installed."""
    kernel = WeightGradientKernel(dtype)
    with (
        mock.patch.object(mcore, "_APEX_EXTENSION", SimpleNamespace(wgrad_gemm_accum_fp32=kernel)),
        mock.patch.object(main_grad, "_has_apex", lambda gradient_dtype, device: gradient_dtype == dtype),
        mock.patch.object(layers, "torch", _TorchWithoutContents()),
    ):
        yield kernel


@contextlib.contextmanager
def mixed_product(*, refuses_other_sums: bool = False) -> Iterator[MixedProduct]:
    """Let torch multiply halves into a float32 sum, as it does on CUDA."""
    product = MixedProduct(refuses_other_sums=refuses_other_sums)
    main_grad._has_mixed_product.cache_clear()
    try:
        with mock.patch.object(torch, "addmm", product), mock.patch.object(layers, "torch", _TorchWithoutContents()):
            yield product
    finally:
        main_grad._has_mixed_product.cache_clear()
