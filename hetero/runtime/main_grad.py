"""Adds up a parameter's gradients over microbatches in ``main_grad``, by the protocol of Megatron-LM.

A parameter has three attributes beside ``.grad``:

* ``main_grad``: the sum so far, of the parameter's shape, in full precision. A view of its bucket where it can be.
* ``grad_added_to_main_grad``: a fused kernel has added the gradient of this backward itself. What autograd then puts
  into ``.grad`` is a tensor of any content, there for the sake of its hooks.
* ``zero_out_wgrad``, which megatron-core sets on a weight that one backward uses twice, as embedding and as head: what
  the kernel leaves to autograd is zeros, which autograd has added to the other use's gradient.

Kernels that add by themselves: apex's ``fused_weight_gradient_mlp_cuda``, which megatron-core's linear layers call, and
TransformerEngine's. They are read in megatron-core 0.16.1 (tensor_parallel/layers.py:559-616, whose hook is in
distributed/distributed_data_parallel.py:423-452) and TransformerEngine 2.11 (pytorch/module/linear.py:943-966).
"""

import torch
from megatron.core.tensor_parallel import layers

_FUSED_DTYPE = torch.float32
"""Of ``main_grad`` in fused kernels; megatron-core knows halves as well, in which nothing is summed here."""


def can_fuse_accumulation(gradient_dtype: torch.dtype) -> bool:
    """Whether megatron-core's linear layers can add to a ``main_grad`` of this precision by apex's kernel."""
    return layers._grad_accum_fusion_available and gradient_dtype == _FUSED_DTYPE


def let_transformer_engine_accumulate(module: torch.nn.Module) -> None:
    """Let all of TransformerEngine's linear layers in ``module`` add to ``main_grad`` themselves.

    megatron-core's one setting for that also goes to the head, which is never TransformerEngine's and refuses it where
    apex is not installed.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True  # type: ignore[assignment]  # of torch's modules, no field


def attach_main_grad(parameter: torch.nn.Parameter, main_grad: torch.Tensor) -> None:
    """Let the gradients of ``parameter`` add up in ``main_grad``."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]  # by Megatron-LM's protocol
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # of that protocol
    if getattr(parameter, "zero_out_wgrad", False) and parameter.dtype != main_grad.dtype:
        # Autograd adds up the gradients of its two uses, before anybody sees them: in full precision too.
        parameter.grad_dtype = main_grad.dtype


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The sum of the gradients so far."""
    found: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]  # of that protocol
    return found


def add_grad(parameter: torch.nn.Parameter) -> None:
    """Add ``.grad`` to ``main_grad``, unless a kernel has done so, and forget it."""
    added: bool = parameter.grad_added_to_main_grad  # type: ignore[attr-defined]  # of that protocol
    if parameter.grad is not None and (not added or getattr(parameter, "zero_out_wgrad", False)):
        main_grad(parameter).add_(parameter.grad)
    drop_grad(parameter)
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]  # of that protocol


def drop_grad(parameter: torch.nn.Parameter) -> None:
    """Forget ``.grad`` alone, which a kernel has left behind that adds later."""
    parameter.grad = None


def comes_later(parameter: torch.nn.Parameter) -> bool:
    """Whether TransformerEngine adds this gradient after the backward, which brings a ``.grad`` all the same."""
    return getattr(parameter, "skip_backward_post_hook", False)


def add_product(
    parameter: torch.nn.Parameter, *, rows: torch.Tensor, output_gradient: torch.Tensor, fused: bool
) -> None:
    """Add the gradient of a linear layer's weight [O, I] to ``main_grad``.

    Args:
        rows: the layer's input [N, I].
        output_gradient: [N, O].
        fused: by apex's kernel, in one go.
    """
    if fused:
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
            rows.contiguous(), output_gradient.contiguous(), main_grad(parameter)
        )
    else:
        main_grad(parameter).add_(output_gradient.t() @ rows)
