"""The sum of a parameter's gradients: added once each, whether autograd brings them or a kernel adds them itself."""

from typing import Any
from unittest import mock

import pytest
import torch

from hetero.plan.ir import Precision
from hetero.runtime.main_grad import (
    _add_rows,
    add_grad,
    add_product,
    add_weight_gradient,
    attach_main_grad,
    can_fuse_accumulation,
    let_embedding_accumulate,
    look_up_rows,
    main_grad,
)
from tests.helpers.fused_kernels import apex_kernel, mixed_product

CPU = torch.device("cpu")


def parameter(dtype: torch.dtype = torch.bfloat16, *, used_twice: bool = False) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
    if used_twice:
        made.zero_out_wgrad = True
    attach_main_grad(made, torch.zeros(2, 3, dtype=torch.float32))
    return made


def test_gradients_of_autograd_add_up_in_full_precision() -> None:
    """1 + 2^-9 is 1 in bfloat16."""
    tensor = parameter()
    for gradient in (1.0, 2.0**-9):
        (tensor * gradient).sum().backward()
        add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.full((2, 3), 1 + 2.0**-9))
    assert tensor.grad is None


def test_what_a_kernel_leaves_to_autograd_is_not_added() -> None:
    tensor = parameter()
    main_grad(tensor).add_(3.0)
    tensor.grad = torch.full((2, 3), torch.nan, dtype=tensor.dtype)
    tensor.grad_added_to_main_grad = True
    add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.full((2, 3), 3.0))
    assert tensor.grad is None
    (tensor * 1.0).sum().backward()
    add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.full((2, 3), 4.0)), "the kernel spoke of one backward"


def test_a_weight_that_a_backward_uses_twice_counts_its_other_use() -> None:
    """The kernel adds one use and leaves zeros; autograd adds those to the gradient of the other."""
    tensor = parameter(used_twice=True)
    main_grad(tensor).add_(3.0)
    tensor.grad_added_to_main_grad = True
    (tensor * 0.0 + tensor * 2.0).sum().backward()
    add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.full((2, 3), 5.0))


def test_a_weight_that_a_backward_uses_twice_is_summed_in_full_precision() -> None:
    tensor = parameter(used_twice=True)
    (tensor * 1.0 + tensor * 2.0**-9).sum().backward()
    add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.full((2, 3), 1 + 2.0**-9))


def test_a_gradient_that_was_set_by_hand_counts() -> None:
    """TransformerEngine's ``backward_dw`` sets ``.grad`` in the weight's precision where it does not fuse."""
    tensor = parameter()
    tensor.grad = torch.ones(2, 3, dtype=torch.bfloat16)
    add_grad(tensor)
    assert torch.equal(main_grad(tensor), torch.ones(2, 3))


@pytest.mark.parametrize("fused", [False, True])
def test_apexs_kernel_is_preferred(fused: bool) -> None:
    tensor = parameter(torch.float32)
    rows, gradient = torch.randn(5, 3), torch.randn(5, 2)
    with apex_kernel(torch.float32) as kernel:
        for _ in range(2):
            add_product(tensor, rows=rows, output_gradient=gradient, fused=fused)
    torch.testing.assert_close(main_grad(tensor), 2 * gradient.t() @ rows)
    assert tensor.grad is None
    assert len(kernel.calls) == (2 if fused else 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_product_goes_straight_into_the_sum(dtype: torch.dtype) -> None:
    rows, gradient, before = (torch.randn(size, dtype=dtype) for size in ((5, 3), (5, 2), (2, 3)))
    summed = before.clone()
    add_weight_gradient(rows, gradient, summed)
    torch.testing.assert_close(summed, before + gradient.t() @ rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_halves_is_not_rounded_on_its_way_into_the_sum(dtype: torch.dtype) -> None:
    """1 + 2^-12 is 1 in both."""
    rows = torch.tensor([[1.0], [2.0**-12]], dtype=dtype)
    summed = torch.full((1, 1), 3.0)
    with mixed_product() as product:
        add_weight_gradient(rows, torch.ones(2, 1, dtype=dtype), summed)
    assert summed.item() == 4 + 2.0**-12
    assert product.calls == [(1, 1)]


def test_an_expert_without_tokens_adds_nothing() -> None:
    summed = torch.ones(2, 3)
    with mixed_product() as product:
        add_weight_gradient(torch.ones(0, 3, dtype=torch.bfloat16), torch.ones(0, 2, dtype=torch.bfloat16), summed)
    assert torch.equal(summed, torch.ones(2, 3))
    assert product.calls == []


@pytest.mark.parametrize(("precision", "on_cpu"), [("fp64", True), ("fp32", True), ("bf16", False), ("fp16", False)])
def test_what_can_be_added_by_its_product(precision: Precision, on_cpu: bool) -> None:
    """CPUs have no product of halves with a float32 sum; torch 2.9 has one on CUDA that takes no sum in float32."""
    assert can_fuse_accumulation(precision, CPU) == on_cpu
    with mixed_product():
        assert can_fuse_accumulation(precision, CPU)
    with mixed_product(refuses_other_sums=True):
        assert can_fuse_accumulation(precision, CPU) == on_cpu


def test_a_cpu_on_a_machine_with_a_gpu_does_not_add_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core makes what it leaves to autograd on the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not can_fuse_accumulation("fp32", CPU)


def test_apex_adds_halves_where_torch_cannot() -> None:
    with apex_kernel(torch.float32):
        assert can_fuse_accumulation("bf16", CPU)


TOKENS = torch.tensor([[1, 1, 0], [1, 0, 1]])
"""The second row of a weight [2, 3] four times, the first one twice."""


def test_an_embedding_adds_its_rows_to_the_sum_in_full_precision() -> None:
    """1 + 2^-9 is 1 in bfloat16. What is left to autograd is not added, whatever it holds."""
    weight = parameter()
    let_embedding_accumulate(weight, head_accumulates=False)
    main_grad(weight).fill_(3.0)
    rows = look_up_rows(TOKENS, weight)
    assert torch.equal(rows, torch.nn.functional.embedding(TOKENS, weight))
    gradient = torch.ones(2, 3, 3, dtype=torch.bfloat16)
    gradient[0, 0] = 2.0**-9
    rows.backward(gradient)
    assert weight.grad is not None, "autograd has called its hooks"
    weight.grad.fill_(torch.nan)
    add_grad(weight)
    assert torch.equal(main_grad(weight), torch.tensor([[5.0] * 3, [6 + 2.0**-9] * 3]))


def test_an_embedding_without_a_sum_leaves_its_gradient_to_autograd() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    let_embedding_accumulate(weight, head_accumulates=False)
    look_up_rows(TOKENS, weight).sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[2.0] * 3, [4.0] * 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_accumulates", [False, True])
def test_an_embedding_that_is_the_head_counts_both_uses(head_accumulates: bool, dtype: torch.dtype) -> None:
    """In one backward, after which autograd calls the hooks of the weight once."""
    weight = parameter(dtype, used_twice=True)
    let_embedding_accumulate(weight, head_accumulates=head_accumulates)
    calls: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(calls.append)
    hidden = look_up_rows(TOKENS, weight)
    (_Head.apply(hidden.flatten(0, 1), weight) if head_accumulates else hidden @ weight.t()).sum().backward()
    assert len(calls) == 1
    add_grad(weight)
    # Six tokens of ones go into both rows of the head; a row's gradient is that of its hidden state, 2.
    assert torch.equal(main_grad(weight), torch.tensor([[6.0 + 2 * 2] * 3, [6.0 + 4 * 2] * 3]))


class _Head(torch.autograd.Function):
    """Adds the gradient of its weight to ``main_grad``, as megatron-core's linear layers do."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        main_grad(weight).add_(gradient.t() @ rows)
        weight.grad_added_to_main_grad = True
        rest = torch.zeros_like(weight) if weight.zero_out_wgrad else torch.full_like(weight, torch.nan)
        return gradient @ weight, rest


def test_rows_add_up_alike_on_both_devices() -> None:
    rows, sums = torch.randn(2, 3, 3, dtype=torch.float64), [torch.ones(2, 3, dtype=torch.float64) for _ in range(2)]
    for on_cuda, summed in zip((True, False), sums, strict=True):
        _add_rows(summed, TOKENS, rows, on_cuda=on_cuda)
    torch.testing.assert_close(*sums)


def test_rows_of_other_tensor_parallel_ranks_do_not_stand_in_one_queue() -> None:
    """On CUDA, which adds rows of one token one after another. What is not a number is no zero."""
    tokens, rows = torch.zeros(2, 400, dtype=torch.int64), torch.zeros(2, 400, 3)
    tokens[0, ::8] = torch.arange(50) % 25
    rows[0, ::8] = 1.0
    rows[1, 7] = torch.nan
    summed, put = torch.zeros(500, 3), torch._index_put_impl_
    with mock.patch.object(torch, "_index_put_impl_", side_effect=put) as adds:
        _add_rows(summed, tokens, rows, on_cuda=True)
    (added,) = adds.call_args.args[1]
    # 500 rows for 800 tokens, two of each of the 25 that are added.
    assert added.flatten().bincount().max() <= 2 + 2
    assert summed[0].isnan().all()
    assert torch.equal(summed[1:], torch.cat([torch.full((24, 3), 2.0), torch.zeros(475, 3)]))
