"""The sum of a parameter's gradients: added once each, whether autograd brings them or a kernel adds them itself."""

import pytest
import torch

from hetero.plan.ir import Precision
from hetero.runtime.main_grad import (
    add_grad,
    add_product,
    add_weight_gradient,
    attach_main_grad,
    can_fuse_accumulation,
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


def test_apex_adds_halves_where_torch_cannot() -> None:
    with apex_kernel(torch.float32):
        assert can_fuse_accumulation("bf16", CPU)
