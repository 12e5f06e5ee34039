"""Splits a backward in two: linear layers that compute the gradient of their input now, that of their weight later.

For a layer Y = X W^T (+ bias), a backward usually computes dX = dY W and dW = dY^T X. Here it computes dX alone and
keeps X and dY; dW is computed when :meth:`DelayedWeightGradients.compute` asks for it (zero bubble, arXiv 2401.10241).

The four linear layers of a block are of this kind, its experts' included, be they local ones or TransformerEngine's.
Biases, norms, router and embedding are cheap, and their gradients stay in the backward. So does the head's: what it
would keep, the gradient of the logits, is larger than all else, and the head of a tied model shares its weight with the
embedding.

TransformerEngine's layers (2.3 and newer) put what they delay into a ``WeightGradStore`` each. Its queue knows neither
microbatches nor that gradients add up (``backward_dw`` assigns ``.grad``), so each gets a store that hands it on here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from hetero.runtime.main_grad import add_gradient, add_later, add_product


class DelayedGradient(Protocol):
    """Is what one layer has left to compute of one microbatch."""

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Whose gradients :meth:`add` adds to."""
        ...

    def add(self) -> None:
        """Compute it, and add it to every ``main_grad``, in whose precision it is summed."""
        ...


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

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return (self.weight,)

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


class TransformerEngineProduct(NamedTuple):
    """Keeps what one of TransformerEngine's linear layers still has to compute, for one microbatch.

    compute: of ``tensors``, the gradients of the weight and, where the layer adds its bias itself, of that: one call
        makes both. With ``into_main_grad`` it has added the weight's to its ``main_grad``.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    tensors: Sequence[Any]
    compute: Callable[..., tuple[torch.Tensor | None, ...]]
    into_main_grad: bool

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @torch.no_grad()
    def add(self) -> None:
        """Add both to their ``main_grad``, where the weight's may be already."""
        weight_gradient, bias_gradient, *_ = self.compute(*self.tensors)
        if not self.into_main_grad:
            add_gradient(self.weight, weight_gradient)
        if self.bias is not None:
            add_gradient(self.bias, bias_gradient)


class DelayedWeightGradients:
    """Keeps, by microbatch, what the gradients of one stage's weights are still to be computed from."""

    def __init__(self) -> None:
        self._of_backward: list[DelayedGradient] = []
        self._waiting: dict[int, list[DelayedGradient]] = {}

    def delay(self, product: DelayedGradient) -> None:
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
            ready: told each parameter whose gradient has just grown.
        """
        products = self._waiting.pop(microbatch)
        products.reverse()
        while products:
            product = products.pop()
            product.add()
            if ready is not None:
                for parameter in product.parameters:
                    ready(parameter)


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


class _MicrobatchStore:
    """Takes the place of a ``WeightGradStore`` (transformer_engine/pytorch/module/_common.py:189) of one layer.

    Args:
        fp8: the layer's products are in fp8, where the backward makes the gradient of a bias itself.
    """

    def __init__(self, delayed: DelayedWeightGradients, layer: torch.nn.Module, *, fp8: bool) -> None:
        self._delayed = delayed
        # A reference back to the layer would be a cycle.
        parameters = dict(layer.named_parameters(recurse=False))
        self._weight = parameters["weight"]
        self._bias = parameters["bias"] if layer.apply_bias and not fp8 else None
        self._into_main_grad = bool(layer.fuse_wgrad_accumulation)
        for parameter in (self._weight, self._bias):
            if parameter is not None:
                add_later(parameter)

    def delay_wgrad_compute(self) -> bool:
        """Asked by the layer's backward before it computes the weight's gradient."""
        return True

    def put(self, tensors: Sequence[Any], compute: Callable[..., tuple[torch.Tensor | None, ...]]) -> None:
        """Called by the layer's backward instead."""
        self._delayed.delay(TransformerEngineProduct(self._weight, self._bias, tensors, compute, self._into_main_grad))


def delay_weight_gradients(module: torch.nn.Module, *, fp8: bool) -> DelayedWeightGradients:
    """Let all split layers of ``module`` leave the gradients of their weights to what is returned.

    Those are the local ones that are made for it, and every linear layer of TransformerEngine.

    Args:
        fp8: TransformerEngine multiplies in fp8.
    """
    delayed = DelayedWeightGradients()
    for layer in module.modules():
        if isinstance(layer, _SplitLinear):
            layer.delayed = delayed
        elif getattr(layer, "wgrad_store", None) is not None:
            layer.wgrad_store = _MicrobatchStore(delayed, layer, fp8=fp8)  # type: ignore[assignment]  # not ours to declare
    return delayed
