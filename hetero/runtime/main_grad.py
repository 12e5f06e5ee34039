"""Adds up a parameter's gradients over microbatches in ``main_grad``, by the protocol of Megatron-LM.

A parameter has three attributes beside ``.grad``:

* ``main_grad``: the sum so far, of the parameter's shape, in full precision. A view of its bucket where it can be.
* ``grad_added_to_main_grad``: the layer has added the gradient of this backward itself. What autograd then puts into
  ``.grad`` is a tensor of any content, there for the sake of its hooks.
* ``zero_out_wgrad``, which megatron-core sets on a weight that one backward uses twice, as embedding and as head: what
  is in ``.grad`` counts, as one use may have added its gradient itself, and left zeros, while the other has not.

Who adds by itself:

* TransformerEngine's linear layers (2.11, pytorch/module/linear.py:943-966)
* megatron-core's (0.16.1, tensor_parallel/layers.py:559-616, whose hook is in
  distributed/distributed_data_parallel.py:423-452), which ask for apex's extension: :func:`add_weight_gradient` takes
  its place and needs no apex.
* the embedding of tokens: :func:`look_up_rows`

A product that adds saves writing the gradient and a pass that reads it and the sum again, for every microbatch. An
embedding saves more: its gradient has all rows of the vocabulary, of which a microbatch uses few.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from hetero.plan.ir import Precision
from hetero.runtime import mcore
from hetero.runtime.dtypes import DTYPES, GRADIENT_DTYPES

_APEX_SUM = torch.float32
"""dtype of the sums that apex's kernel adds to; it knows halves as well, in which nothing is summed here."""


def can_fuse_accumulation(precision: Precision, device: torch.device) -> bool:
    """Return whether a layer's product in ``precision`` can add to ``main_grad`` on this device.

    It always can where both have one dtype. Half precision needs a product with a float32 sum, which CUDA has.
    """
    if device.type == "cpu" and torch.cuda.is_available():
        # What megatron-core's layers leave to autograd would be on the GPU (layers.py:597,607).
        return False
    dtype, gradient_dtype = DTYPES[precision], GRADIENT_DTYPES[precision]
    return dtype == gradient_dtype or _has_apex(gradient_dtype, device) or _has_mixed_product(dtype, device)


def _has_apex(gradient_dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cuda" and gradient_dtype == _APEX_SUM and mcore.apex_weight_gradient() is not None


@cache
def _has_mixed_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch can add a product of ``dtype`` to a float32 sum on this device, by trying it.

    torch 2.10 and newer can on CUDA, bfloat16 from compute capability 8.0 on (ATen/native/cuda/Blas.cpp,
    ``_addmm_dtype_out_cuda``; ATen/cuda/CUDABlas.cpp, ``gemm<at::BFloat16, float>``). CPUs have no such product.
    """
    factor = torch.ones(1, 1, dtype=dtype, device=device)
    try:
        _add_product_to(torch.zeros(1, 1, device=device), factor, factor)
    except RuntimeError:
        return False
    return True


def add_weight_gradient(rows: torch.Tensor, output_gradient: torch.Tensor, summed: torch.Tensor) -> None:
    """Add the gradient of a linear layer's weight to its sum, in one product.

    By apex's kernel where it is installed, else by torch's.

    Args:
        rows: the layer's input [N, I], contiguous.
        output_gradient: [N, O], contiguous.
        summed: [O, I], of the same dtype or float32.
    """
    if not rows.shape[0]:
        # An expert without tokens: multiplying the sum by 1 would be a pass over it.
        return
    apex = mcore.apex_weight_gradient()
    if apex is not None and _has_apex(summed.dtype, summed.device):
        apex(rows, output_gradient, summed)
    else:
        _add_product_to(summed, output_gradient.t(), rows)


def _add_product_to(summed: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == summed.dtype:
        summed.addmm_(left, right)
    else:
        torch.addmm(summed, left, right, out_dtype=summed.dtype, out=summed)


def let_transformer_engine_accumulate(module: torch.nn.Module) -> None:
    """Let all of TransformerEngine's linear layers in ``module`` add to ``main_grad`` themselves.

    megatron-core's one setting for that also goes to the head, which is never TransformerEngine's.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # of torch's modules, no field


def let_embedding_accumulate(weight: torch.nn.Parameter, *, head_accumulates: bool) -> None:
    """Let the embedding with this weight add the gradients of its rows to ``main_grad`` itself.

    Args:
        head_accumulates: the head's product adds to ``main_grad``, too. It has the same weight in a tied model of one
            stage.
    """
    is_head = getattr(weight, "zero_out_wgrad", False)
    weight.accumulates_rows = True  # type: ignore[attr-defined]  # read where the embedding finds its weight
    # Of two uses, one gradient is enough for autograd's hooks.
    weight.leaves_grad_to_head = is_head  # type: ignore[attr-defined]  # as above
    if is_head and head_accumulates:
        # Nothing of what the two leave to autograd counts.
        weight.zero_out_wgrad = False  # type: ignore[attr-defined]  # by Megatron-LM's protocol


def look_up_rows(tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows [..., H] of an embedding's weight [V, H] for ``tokens`` [...].

    The backward adds their gradients to ``main_grad`` where :func:`let_embedding_accumulate` has let it.
    """
    if getattr(weight, "accumulates_rows", False) and hasattr(weight, "main_grad"):
        rows: torch.Tensor = _Rows.apply(tokens, weight)  # type: ignore[no-untyped-call]  # torch has no type for it
        return rows
    return F.embedding(tokens, weight)


class _Rows(torch.autograd.Function):
    """Looks up rows of a weight, and adds their gradients to its ``main_grad``."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (tokens,), weight = ctx.saved_tensors, ctx.weight
        summed = main_grad(weight)
        _add_rows(summed, tokens, gradient.to(summed.dtype), on_cuda=summed.is_cuda)
        weight.grad_added_to_main_grad = True
        return None, None if weight.leaves_grad_to_head else torch.empty_like(weight)


def _add_rows(summed: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, *, on_cuda: bool) -> None:
    """Add ``rows`` [..., H] to those of ``summed`` [V, H], in an order that is the same each time."""
    if on_cuda:
        # ``index_add_`` would add in any order there. The safe form asks the device for the largest of the tokens, all
        # of which the forward has looked up (ATen/native/TensorAdvancedIndexing.cpp, ``_index_put_impl_``).
        torch._index_put_impl_(summed, (_spread_zeros(tokens, rows, len(summed)),), rows, accumulate=True, unsafe=True)
    else:
        summed.index_add_(0, tokens.flatten(), rows.flatten(0, -2))


def _spread_zeros(tokens: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return ``tokens`` with another of ``num_rows`` for each that adds zeros.

    Tokens of other tensor-parallel ranks are all 0 here, and their rows zeros (layers.py:278,290). CUDA adds the rows
    of one token one after another (ATen/native/cuda/Indexing.cu, ``indexing_backward_kernel``): with tp 8, seven of
    eight rows would stand in one queue.
    """
    others = torch.arange(tokens.numel(), device=tokens.device).remainder_(num_rows).view(tokens.shape)
    return torch.where(rows.any(dim=-1), tokens, others)


def attach_main_grad(parameter: torch.nn.Parameter, main_grad: torch.Tensor) -> None:
    """Let the gradients of ``parameter`` add up in ``main_grad``."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]  # by Megatron-LM's protocol
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # by that protocol
    if getattr(parameter, "zero_out_wgrad", False) and parameter.dtype != main_grad.dtype:
        # Autograd adds up the gradients of its two uses, before anybody sees them: in full precision too.
        parameter.grad_dtype = main_grad.dtype


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The sum of the gradients so far."""
    found: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]  # by that protocol
    return found


def add_grad(parameter: torch.nn.Parameter) -> None:
    """Add ``.grad`` to ``main_grad``, unless a kernel has done so, and forget it."""
    added: bool = parameter.grad_added_to_main_grad  # type: ignore[attr-defined]  # by that protocol
    if parameter.grad is not None and (not added or getattr(parameter, "zero_out_wgrad", False)):
        main_grad(parameter).add_(parameter.grad)
    drop_grad(parameter)
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # by that protocol


def drop_grad(parameter: torch.nn.Parameter) -> None:
    """Forget ``.grad`` alone, which a kernel has left behind that adds later."""
    parameter.grad = None


def add_later(parameter: torch.nn.Parameter) -> None:
    """Mark a parameter of TransformerEngine whose gradient is added after the backward, past autograd.

    As TransformerEngine marks them itself, for megatron-core (distributed_data_parallel.py:328).
    """
    parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]  # by that protocol


def comes_later(parameter: torch.nn.Parameter) -> bool:
    """Whether this gradient is added after the backward, in which autograd calls the parameter's hooks all the same."""
    return getattr(parameter, "skip_backward_post_hook", False)


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Add a gradient that was computed past autograd to ``main_grad``."""
    assert gradient is not None
    main_grad(parameter).add_(gradient)


def add_product(
    parameter: torch.nn.Parameter, *, rows: torch.Tensor, output_gradient: torch.Tensor, fused: bool
) -> None:
    """Add the gradient of a linear layer's weight [O, I] to ``main_grad``.

    Args:
        rows: the layer's input [N, I].
        output_gradient: [N, O].
        fused: in one product.
    """
    if fused:
        add_weight_gradient(rows.contiguous(), output_gradient.contiguous(), main_grad(parameter))
    else:
        main_grad(parameter).add_(output_gradient.t() @ rows)
