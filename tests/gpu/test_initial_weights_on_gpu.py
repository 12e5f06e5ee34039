"""On a GPU: initial weights are computed there, and have the bits that a host computes."""

import pytest
import torch

from hetero.runtime.initial_weights import draw_weights
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model, llama_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

MODEL = llama_model(
    hidden_size=1024,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=128,
    ffn_hidden_size=2816,
    vocab_size=32000,
    padded_vocab_size=32000,
)


def drawn(model: ModelSpec, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """The weights of the second of two tensor-parallel ranks."""
    held = {
        p.name: (p, torch.nn.Parameter(torch.empty(p.local_shape(2), dtype=dtype, device=device)))
        for p in parameters(model)
    }
    draw_weights(held, model=model, tp=2, tp_rank=1, seed=1234, std=0.02)
    return {name: tensor.detach() for name, (_, tensor) in held.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", [MODEL, gpt2_model()], ids=["llama", "gpt2"])
def test_a_gpu_draws_the_bits_of_the_host(model: ModelSpec, dtype: torch.dtype) -> None:
    expected = drawn(model, dtype, torch.device("cpu"))
    for name, weight in drawn(model, dtype, torch.device("cuda", 0)).items():
        assert torch.equal(weight.cpu(), expected[name]), name


def test_drawing_needs_little_memory() -> None:
    """What it needs beside the weights is there for a moment, and does not grow with them."""
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    weights = drawn(MODEL, torch.bfloat16, device)
    held = torch.cuda.memory_allocated(device) - before
    assert held < 1.1 * sum(weight.nbytes for weight in weights.values()) + 2**20
    assert torch.cuda.max_memory_allocated(device) - before - held < 200 * 2**20
