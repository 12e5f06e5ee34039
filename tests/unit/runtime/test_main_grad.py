"""The sum of a parameter's gradients: added once each, whether autograd brings them or a kernel adds them itself."""

import pytest
import torch

from hetero.runtime.main_grad import add_grad, add_product, attach_main_grad, main_grad
from tests.helpers.fused_kernels import fused_kernels


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
def test_a_product_goes_straight_into_the_sum(fused: bool) -> None:
    tensor = parameter(torch.float32)
    rows, gradient = torch.randn(5, 3), torch.randn(5, 2)
    with fused_kernels(torch.float32) as kernel:
        for _ in range(2):
            add_product(tensor, rows=rows, output_gradient=gradient, fused=fused)
    torch.testing.assert_close(main_grad(tensor), 2 * gradient.t() @ rows)
    assert tensor.grad is None
    assert len(kernel.calls) == (2 if fused else 0)
