"""One graph serves experts with any number of tokens, whichever number comes first."""

import itertools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from hetero.runtime.mcore import CompiledForAnyRows

HIDDEN = 16
NUM_TOKENS = (0, 1, 2, 3, 64, 257)
NUM_OTHERS = (0, 1, 5)
"""Tokens of the experts before, whose probabilities come first in memory."""

BOUND = {torch.float32: 2e-5, torch.bfloat16: 0.2}
"""Of numbers up to 20 that are rounded after each operation or once, by what the compiler makes of it."""


def swiglu(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first, second = torch.chunk(y, 2, -1)
    return (torch.nn.functional.silu(first) * second * weights).to(y.dtype)


def swiglu_backward(gradient: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second = torch.chunk(y, 2, -1)
    sigmoid = torch.sigmoid(first)
    weighted = gradient * weights
    of_y = torch.cat((weighted * sigmoid * (1 + first * (1 - sigmoid)) * second, weighted * first * sigmoid), -1)
    of_weights = (swiglu(y, torch.ones_like(weights)) * gradient.to(weights.dtype)).sum(dim=-1, keepdim=True)
    return of_y.to(y.dtype), of_weights


@pytest.fixture
def _compiler_is_fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


def expert_arguments(tokens: int, others: int, *, follows: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Make what megatron-core has for an expert: a gradient, a view of a product, a slice of all probabilities."""
    generator = torch.Generator().manual_seed(tokens)
    gradient = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    product = torch.randn(tokens, 2 * HIDDEN, generator=generator).to(dtype).requires_grad_(follows)
    probabilities = torch.rand(others + tokens + 3, generator=generator).requires_grad_(follows)
    _, own, _ = torch.split(probabilities, [others, tokens, 3])
    return [gradient, product.view(-1, 2 * HIDDEN), own.unsqueeze(-1)]


def as_tuple(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.usefixtures("_compiler_is_fresh")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", NUM_TOKENS[:3])
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.rotates(every=6),
                pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++ for a CPU"),
            ],
        ),
    ],
)
def test_one_graph_serves_any_number_of_tokens(backend: str, first: int, dtype: torch.dtype) -> None:
    for function, begin in ((swiglu, 1), (swiglu_backward, 0)):
        counter = CompileCounterWithBackend(backend)
        compiled = CompiledForAnyRows(torch.compile(function, backend=counter))
        cases: Any = itertools.product((first, *NUM_TOKENS), NUM_OTHERS, (False, True))
        for tokens, others, follows in cases:
            arguments = expert_arguments(tokens, others, follows=follows, dtype=dtype)[begin:]
            with torch.no_grad():
                found = compiled(*arguments)
                exact = function(*(each.double() for each in arguments))
            for one, other in zip(as_tuple(found), as_tuple(exact), strict=True):
                torch.testing.assert_close(one.double(), other, rtol=0.0, atol=BOUND[dtype])
        assert counter.frame_count == 1
