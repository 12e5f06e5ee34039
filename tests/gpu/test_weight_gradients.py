"""On a GPU: torch's products and embeddings add to sums in float32, exactly, alike each time, and without a wait."""

from collections.abc import Callable

import pytest
import torch

from hetero.runtime.main_grad import _add_rows, add_weight_gradient, can_fuse_accumulation
from tests.helpers.gpu_ranks import GPU, device_type_here

pytestmark = [*GPU, pytest.mark.timeout(120)]

TOKENS, INPUTS, OUTPUTS = 2048, 512, 768
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Of the sum, relative to its largest element: products of halves are exact in float32."""


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(7)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def added(add: Callable[[torch.Tensor], None], start: torch.Tensor) -> torch.Tensor:
    """Return ``start`` after ``add``, which gives the same bits again and does not wait for the device."""
    sums = [start.clone() for _ in range(3)]
    add(sums[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in sums[1:]:
            add(each)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sums[1], sums[2])
    return sums[1]


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_a_product_adds_to_its_sum(dtype: torch.dtype) -> None:
    precision = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if precision not in device_type_here("cuda").precisions:
        pytest.skip(f"no {precision} here")
    assert can_fuse_accumulation(precision, torch.device("cuda", 0))
    rows, gradient = drawn(TOKENS, INPUTS, dtype=dtype), drawn(TOKENS, OUTPUTS, dtype=dtype)
    start = drawn(OUTPUTS, INPUTS, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    found = added(lambda summed: add_weight_gradient(rows, gradient, summed), start)
    expected = start.double() + gradient.double().t() @ rows.double()
    assert (found.double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


@pytest.mark.parametrize(("vocabulary", "tp"), [(1, 1), (50, 1), (128_256, 1), (16_032, 8)])
def test_rows_add_to_their_sum(vocabulary: int, tp: int) -> None:
    tokens = torch.randint(0, vocabulary, (2, TOKENS // 2), generator=torch.Generator().manual_seed(7)).cuda()
    rows, start = drawn(2, TOKENS // 2, INPUTS, dtype=torch.float32), drawn(vocabulary, INPUTS, dtype=torch.float32)
    # Tokens of other tensor-parallel ranks.
    tokens[:, tokens.shape[1] // tp :], rows[:, tokens.shape[1] // tp :] = 0, 0.0
    found = added(lambda summed: _add_rows(summed, tokens, rows, on_cuda=True), start)
    expected = start.double().index_add_(0, tokens.flatten(), rows.double().flatten(0, 1))
    assert (found.double() - expected).abs().max() <= 1e-5 * expected.abs().max()
