"""Splits a backward in two: linear layers that compute the gradient of their input now, that of their weight later.

For a layer Y = X W^T (+ bias), a backward usually computes dX = dY W and dW = dY^T X. Here it computes dX alone and
keeps X and dY; dW is computed when :meth:`DelayedWeightGradients.compute` asks for it (zero bubble, arXiv 2401.10241).

The four linear layers of a block are of this kind, its experts' included. Biases, norms, router and embedding are
cheap, and their gradients stay in the backward. So does the head's: what it would keep, the gradient of the logits, is
larger than all else, and the head of a tied model shares its weight with the embedding.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from hetero.runtime.main_grad import add_product


class Product(NamedTuple):
    """Keeps what the gradient of one weight [O, I] is still to be computed from, for one microbatch.

    input: [..., I], output_gradient: [..., O]
    sequence_group: the tensor-parallel ranks among which the rows of the input are cut, ``None`` if they are not.
    fused: the kernel that multiplies adds as well.
    """

    weight: torch.nn.Parameter
    input: torch.Tensor
    output_gradient: torch.Tensor
    sequence_group: dist.ProcessGroup | None
    fused: bool = False

    @torch.no_grad()
    def add(self) -> None:
        """Add it to the weight's ``main_grad``.

        With a ``sequence_group``, an all-gather of the input over it comes first.
        """
        rows, gradient = self.input, self.output_gradient
        if self.sequence_group is not None:
            rows = rows.new_empty((self.sequence_group.size() * rows.shape[0], *rows.shape[1:]))
            dist.all_gather_into_tensor(rows, self.input.contiguous(), group=self.sequence_group)
        add_product(self.weight, rows=rows.flatten(0, -2), output_gradient=gradient.flatten(0, -2), fused=self.fused)


class DelayedWeightGradients:
    """Keeps, by microbatch, what the gradients of one stage's weights are still to be computed from."""

    def __init__(self) -> None:
        self._of_backward: list[Product] = []
        self._waiting: dict[int, list[Product]] = {}

    def delay(self, product: Product) -> None:
        """Keep a product of the backward that is running."""
        self._of_backward.append(product)

    def end_of_backward(self, microbatch: int) -> None:
        """Assign what was delayed since the last call to ``microbatch``."""
        self._waiting[microbatch] = self._of_backward
        self._of_backward = []

    def compute(self, microbatch: int, *, ready: Callable[[torch.nn.Parameter], None] | None) -> None:
        """Compute the gradients of the weights for ``microbatch``, in the order of the backward, and let go of it.

        Collective over the tensor-parallel group where it cuts the sequence: one all-gather per column-parallel layer.

        Args:
            ready: told each weight whose gradient has just grown.
        """
        products = self._waiting.pop(microbatch)
        products.reverse()
        while products:
            product = products.pop()
            product.add()
            if ready is not None:
                ready(product.weight)


class _SplitLinear:
    """Lets megatron-core's linear layers keep what the weight's gradient needs instead of computing it.

    A layer whose weight wants no gradient computes what is left, that of its input.
    """

    delayed: DelayedWeightGradients

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.nn.Parameter,
        *,
        bias: torch.Tensor | None,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **options: object,
    ) -> torch.Tensor:
        output: torch.Tensor = super()._forward_impl(  # type: ignore[misc]  # of the layer that it is mixed into
            input, weight.detach(), bias=None, sequence_parallel=sequence_parallel, tp_group=tp_group, **options
        )
        if output.requires_grad:
            group = tp_group if sequence_parallel else None
            kept, fused = input.detach(), bool(options.get("gradient_accumulation_fusion"))
            output.register_hook(lambda gradient: self.delayed.delay(Product(weight, kept, gradient, group, fused)))
        return output if bias is None else output + bias


class SplitColumnParallelLinear(_SplitLinear, ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A column-parallel layer, the sequence of whose input may be cut."""


class SplitRowParallelLinear(_SplitLinear, RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """A row-parallel layer, which gets its input whole."""


def delay_weight_gradients(module: torch.nn.Module) -> DelayedWeightGradients:
    """Let all split layers of ``module`` leave the gradients of their weights to what is returned."""
    delayed = DelayedWeightGradients()
    for layer in module.modules():
        if isinstance(layer, _SplitLinear):
            layer.delayed = delayed
    return delayed
