"""The initial weights: a normal distribution, the same values however they are cut and wherever they are computed."""

import hashlib
import math
import statistics
from typing import Any

import pytest
import torch

from hetero.runtime import initial_weights
from hetero.runtime.initial_weights import _quantiles_times, draw_weights
from hetero.runtime.named_parameters import take_shard
from hetero.runtime.philox import blocks_on_host
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter, parameters, shard_intervals
from tests.helpers.models import gpt2_model, llama_model, moe_model

MODEL = gpt2_model(num_layers=8, hidden_size=64, kv_channels=16, ffn_hidden_size=128)
ODD = llama_model(
    hidden_size=24, num_attention_heads=4, num_query_groups=4, kv_channels=6, ffn_hidden_size=36, padded_vocab_size=68
)
"""No width is a multiple of a block, so shards begin and end inside of blocks."""


def drawn(
    model: ModelSpec = MODEL, *, seed: int = 1, tp: int = 1, tp_rank: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The weights of one tensor-parallel rank, on memory that holds NaN."""
    held = {
        p.name: (p, torch.nn.Parameter(torch.full(p.local_shape(tp), math.nan, dtype=dtype))) for p in parameters(model)
    }
    draw_weights(held, model=model, tp=tp, tp_rank=tp_rank, seed=seed, std=0.1)
    return {name: tensor.detach() for name, (_, tensor) in held.items()}


def one_matrix(rows: int, columns: int, *, shard_dim: int | None = 0) -> torch.Tensor:
    """A matrix of standard normal values."""
    parameter = Parameter(name="w", shape=(rows, columns), position=0, shard_dim=shard_dim)
    tensor = torch.nn.Parameter(torch.empty(rows, columns))
    draw_weights({"w": (parameter, tensor)}, model=MODEL, tp=1, tp_rank=0, seed=3, std=1.0)
    return tensor.detach()


def test_every_matrix_has_values_of_its_own_and_of_the_seed() -> None:
    ours, same, other = drawn(seed=1), drawn(seed=1), drawn(seed=2)
    matrices = [name for name, weight in ours.items() if weight.dim() == 2]
    assert len(matrices) == 2 + 4 * 8
    assert len({float(ours[name].sum()) for name in matrices}) == len(matrices)
    for name, weight in ours.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, other[name]) == (name not in matrices), name


def test_projections_onto_the_residual_stream_begin_smaller_by_the_depth() -> None:
    """GPT-2: by sqrt(2 L), since two of them in each of L layers add up there."""
    for name, weight in drawn().items():
        if weight.dim() == 2:
            is_projection = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            expected = 0.1 / math.sqrt(2 * 8) if is_projection else 0.1
            assert float(weight.std()) == pytest.approx(expected, rel=0.06), name


def test_norms_begin_with_ones_and_biases_with_zeros() -> None:
    weights = drawn()
    for parameter in parameters(MODEL):
        if parameter.init in ("zeros", "ones"):
            assert weights[parameter.name].unique().tolist() == [float(parameter.init == "ones")], parameter


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", [MODEL, ODD, moe_model()], ids=["gpt2", "odd", "moe"])
def test_a_shard_is_cut_out_of_the_whole(
    model: ModelSpec, tp: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        monkeypatch.setattr(initial_weights, "_is_on_host", lambda _: False)
    whole = drawn(model)
    for tp_rank in range(tp):
        shards = drawn(model, tp=tp, tp_rank=tp_rank)
        for parameter in parameters(model):
            intervals = shard_intervals(parameter, tp=tp, tp_rank=tp_rank)
            expected = take_shard(whole[parameter.name], parameter, intervals)
            assert torch.equal(shards[parameter.name], expected), (parameter, tp_rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("model", [MODEL, ODD], ids=["gpt2", "odd"])
def test_a_device_computes_the_bits_of_the_host(
    model: ModelSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every precision begins with the same values, rounded."""
    of_host = drawn(model, dtype=dtype, tp=2, tp_rank=1)
    rounded = {name: weight.to(dtype) for name, weight in drawn(model, tp=2, tp_rank=1).items()}
    monkeypatch.setattr(initial_weights, "_is_on_host", lambda _: False)
    of_device = drawn(model, dtype=dtype, tp=2, tp_rank=1)
    for name, weight in of_host.items():
        assert torch.equal(weight, of_device[name]), name
        assert torch.equal(weight, rounded[name]), name


@pytest.mark.parametrize("limit", [7, 64])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_how_many_blocks_are_drawn_at_once_changes_nothing(
    limit: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shard = drawn(ODD), drawn(ODD, tp=2, tp_rank=1)
    monkeypatch.setattr(initial_weights, "_HOST_BLOCKS", limit)
    monkeypatch.setattr(initial_weights, "_DEVICE_BLOCKS", limit)
    if on_device:
        monkeypatch.setattr(initial_weights, "_is_on_host", lambda _: False)
    again, shard_again = drawn(ODD), drawn(ODD, tp=2, tp_rank=1)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert all(torch.equal(shard[name], shard_again[name]) for name in shard)


def test_a_rank_computes_what_it_holds_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2_model(hidden_size=256, kv_channels=64, ffn_hidden_size=512)
    computed = []

    def counted(key: int, upper: int, first: int, count: int) -> Any:
        computed.append(count)
        return blocks_on_host(key, upper, first, count)

    monkeypatch.setattr(initial_weights, "blocks_on_host", counted)
    held = drawn(model, tp=4, tp_rank=1)
    assert 16 * sum(computed) == sum(weight.numel() for weight in held.values() if weight.dim() == 2)


def test_the_values_of_a_seed_stay_what_they_are() -> None:
    """A run that starts afresh with the seed of a paper gets the paper's weights, on every machine and version."""
    weights = drawn(llama_model(), seed=1234)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == "776935cb58990ba76eb84050cb5ccdad5188e18686b37071d90d87e7aabcd816"


@pytest.mark.parametrize("shard_dim", [0, 1])
def test_values_are_normally_distributed(shard_dim: int) -> None:
    """Moments within five of their standard errors, and Kolmogorov-Smirnov's distance at a level of 1e-6."""
    values = one_matrix(1000, 4000, shard_dim=shard_dim).double().flatten()
    count = values.numel()
    assert abs(float(values.mean())) < 5 / math.sqrt(count)
    assert abs(float(values.var()) - 1) < 5 * math.sqrt(2 / count)
    assert abs(float((values**3).mean())) < 5 * math.sqrt(15 / count)
    assert abs(float((values**4).mean()) - 3) < 5 * math.sqrt(96 / count)
    cumulative = torch.special.ndtr(values.sort().values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((steps[1:] - cumulative).max()), float((cumulative - steps[:-1]).max()))
    assert distance < math.sqrt(math.log(2 / 1e-6) / 2 / count)


def test_neighbours_rows_and_columns_are_uncorrelated() -> None:
    values = one_matrix(512, 4096).double()
    for distance in (1, 4, 15, 16, 17, 64):
        along, across = values[:, distance:] * values[:, :-distance], values[distance:] * values[:-distance]
        for products in (along, across):
            assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), distance


def test_the_table_is_a_normal_distribution_of_variance_one() -> None:
    table = _quantiles_times(1.0).double()
    assert table.shape == (2**16,)
    assert torch.equal(table, -table.flip(0))
    assert torch.equal(table, table.sort().values)
    assert float((table**2).mean()) == pytest.approx(1, abs=1e-7)
    assert float((table**4).mean()) == pytest.approx(3, abs=2e-4)
    # Each of the 65,536 values stands for an equal part of the distribution, and lies in it.
    edges = torch.arange(2**16 + 1, dtype=torch.float64) / 2**16
    at = torch.special.ndtr(table)
    assert bool((edges[:-1] < at).all())
    assert bool((at < edges[1:]).all())


def test_no_library_of_mathematics_changes_the_table() -> None:
    """A logarithm that differs in the last bits of a double is rounded to the same value of 32 bits."""
    quantile = statistics.NormalDist().inv_cdf
    exact = torch.tensor([quantile((index + 0.5) / 2**16) for index in range(2**15, 2**16 - 1)], dtype=torch.float64)
    for error in (-1e-13, 1e-13):
        assert torch.equal((exact * (1 + error)).float(), _quantiles_times(1.0)[2**15 : -1])
