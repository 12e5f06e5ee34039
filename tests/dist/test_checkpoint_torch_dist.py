"""megatron-core's own ``dist_checkpointing`` reads what is written here, and what it writes is read here."""

import contextlib
import dataclasses
import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.runtime.named_parameters import take_shard
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import StageModel, build_stages
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter, parameters, shard_intervals
from tests.helpers.checkpoints import full_tensor
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.stock_megatron import StockOptions, StockTrainer, stand_ins
from tests.helpers.training import ADAM

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODELS = {
    "llama": llama_model(num_layers=2),
    "llama-tied": llama_model(num_layers=2, tied_embeddings=True),
    "llama-qk-norm": llama_model(num_layers=2, qk_layernorm=True),
    "gpt2": gpt2_model(num_layers=2),
    "mixtral": moe_model(num_layers=2),
}

Arrays = Mapping[str, np.ndarray]


class RandomWeights:
    """Weights that depend on their names alone."""

    step = 3
    dtype = torch.float32

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        return full_tensor(parameter.name, parameter.shape, step=1, dtype=dtype)


def one_rank(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, model.num_layers), ranks=(0,)), num_samples=2)])


def built(plan: Plan, seed: int) -> tuple[StageModel, dict[str, object]]:
    """The layers of the local spec, and the description of their state that dist_checkpointing works from."""
    context = create_groups(plan, device=torch.device("cpu"))
    (model,) = build_stages(context, options=StageOptions(transformer_impl="local"), seed=seed)
    return model, model.module.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})


@contextlib.contextmanager
def without_a_manager() -> Iterator[None]:
    """Its queue comes from a manager process, which takes seconds to start and which only asynchronous saves need."""
    with stand_ins(), mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
        yield


def save_with_megatron(rank: int, folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    with without_a_manager():
        model, state = built(plan, seed=4)
        dist_checkpointing.save({"model": state, "iteration": 7}, str(folder))
    return {name: tensor.detach().numpy().copy() for name, (_, tensor) in model.parameters.items()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_megatron_core_saves_is_read(tmp_path: Path, model: ModelSpec) -> None:
    [expected] = run_ranks(save_with_megatron, 1, tmp_path, one_rank(model))
    source = TorchDistSource(tmp_path, model=model)
    assert source.dtype == torch.float32
    assert expected.keys() == {parameter.name for parameter in parameters(model)}
    for parameter in parameters(model):
        tensor = source.tensor(parameter, torch.float32)
        assert torch.equal(tensor, torch.from_numpy(expected[parameter.name])), parameter.name


def load_strictly(state: dict[str, object], folder: Path) -> dict[str, Any]:
    """Load with nothing missing and nothing left over.

    megatron-core up to 0.19.2 passes all fields of torch's ``TensorProperties`` to ``torch.empty``, which does not take
    the ``strides`` that torch 2.15 has added to them.
    """
    empty = torch.empty

    def empty_without_strides(*args: Any, strides: object = None, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    with mock.patch.object(torch, "empty", empty_without_strides):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RAISE_ALL)
    return loaded


def load_with_megatron(rank: int, folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    model, state = built(plan, seed=5)
    loaded = load_strictly({"model": state}, folder)
    assert loaded["iteration"] == 3
    model.module.load_state_dict(loaded["model"], strict=True)
    return {name: tensor.detach().numpy().copy() for name, (_, tensor) in model.parameters.items()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_megatron_core_loads_what_is_written(tmp_path: Path, model: ModelSpec) -> None:
    source = RandomWeights(model)
    write_torch_dist(source, tmp_path / "a", dtype=torch.float32)
    [found] = run_ranks(load_with_megatron, 1, tmp_path / "a", one_rank(model))
    for parameter in parameters(model):
        expected = source.tensor(parameter, torch.float32).numpy()
        assert np.array_equal(found[parameter.name], expected), parameter.name


def stock_model(plan: Plan, rank: int, seed: int) -> StockTrainer:
    return StockTrainer(plan, rank, adam=ADAM, seed=seed, std=0.1, options=StockOptions())


def save_with_stock(rank: int, folder: Path, plan: Plan) -> tuple[int, Arrays]:
    with without_a_manager():
        trainer = stock_model(plan, rank, seed=4)
        dist_checkpointing.save({"model": trainer.module.sharded_state_dict()}, str(folder))
    place = plan.placement(rank)
    assert place is not None
    return place.tp_rank, {name: tensor.detach().numpy().copy() for name, (_, tensor) in trainer.parameters.items()}


def load_with_stock(rank: int, folder: Path, plan: Plan) -> tuple[int, Arrays]:
    with stand_ins():
        trainer = stock_model(plan, rank, seed=5)
        state = {"model": trainer.module.sharded_state_dict()}
        loaded = load_strictly(state, folder)
    trainer.module.load_state_dict(loaded["model"], strict=True)
    place = plan.placement(rank)
    assert place is not None
    return place.tp_rank, {name: tensor.detach().numpy().copy() for name, (_, tensor) in trainer.parameters.items()}


def two_by_two(model: ModelSpec) -> Plan:
    return uniform_plan(
        UniformLayout(
            model=model,
            world_size=4,
            tp=2,
            pp=2,
            micro_batch_size=1,
            global_batch_size=2,
            seq_length=16,
            device="cpu",
        )
    )


@pytest.mark.rotates(every=2, turn=0)
def test_stock_megatron_core_on_four_ranks(tmp_path: Path) -> None:
    """tp 2, pp 2: every tensor is in parts on its side, whole on ours."""
    model = MODELS["llama"]
    plan = two_by_two(model)
    saved = run_ranks(save_with_stock, 4, tmp_path, plan)
    assert_shards(saved, TorchDistSource(tmp_path, model=model))
    assert_padded_otherwise(tmp_path, model)
    source = RandomWeights(model)
    write_torch_dist(source, tmp_path / "a", dtype=torch.float32)
    assert_shards(run_ranks(load_with_stock, 4, tmp_path / "a", plan), source)


def assert_padded_otherwise(folder: Path, model: ModelSpec) -> None:
    """A model that is padded otherwise than by these ranks has the same rows of tokens."""
    saved = TorchDistSource(folder, model=model)
    for rows in (model.vocab_size, model.padded_vocab_size + 64):
        read = TorchDistSource(folder, model=dataclasses.replace(model, padded_vocab_size=rows))
        assert len(read.notes) == 1
        for there, here in zip(parameters(model), parameters(read.model), strict=True):
            expected, tensor = saved.tensor(there, torch.float32), read.tensor(here, torch.float32)
            both = min(len(expected), len(tensor))
            assert tensor.shape == here.shape
            assert torch.equal(tensor[:both], expected[:both]), here.name


def assert_shards(ranks: list[tuple[int, Arrays]], source: RandomWeights | TorchDistSource) -> None:
    by_name = {parameter.name: parameter for parameter in parameters(source.model)}
    seen = set()
    for tp_rank, arrays in ranks:
        for name, array in arrays.items():
            intervals = shard_intervals(by_name[name], tp=2, tp_rank=tp_rank)
            expected = take_shard(source.tensor(by_name[name], torch.float32), by_name[name], intervals)
            assert np.array_equal(array, expected.numpy()), name
            seen.add(name)
    assert seen == by_name.keys()
