"""A rank's CUDA streams and pinned memory, counted on a CPU that plays both: few streams, and the bytes predicted.

Copies are late in the played streams, and the bits are those of a training without: nothing reads what is still on its
way.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import hetero.runtime.trainer as trainer_module
from hetero.cost.host_memory import host_memory_of_ranks
from hetero.cost.memory import memory_costs
from hetero.elastic.copies import _Staging
from hetero.plan.ir import Plan
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.plan.stream_roles import StreamRole, stream_roles
from hetero.plan.validate import validate
from hetero.runtime.executor import StepInputs
from hetero.runtime.host_slots import BlockKey, Taken
from hetero.runtime.options import DataParallelOptions
from hetero.runtime.trainer import Trainer
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.played_streams import played_cuda
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
MAX_STREAMS = 8
"""What a rank may have besides its communicators' and its computes'."""

OPTIMIZER = Offload(optimizer_from=-1)
GRADIENTS = Offload(optimizer_from=-1, gradients_from=-1)
WEIGHTS = Offload(optimizer_from=-1, gradients_from=-1, weights_from=-1)
RESIDENCIES = {
    "nothing": NOTHING_ON_HOST,
    "optimizer": OPTIMIZER,
    "previews": dataclasses.replace(OPTIMIZER, speculate=True),
    "gradients": GRADIENTS,
    "weights": WEIGHTS,
    "activations": Offload(activations_until=4),
    "everything": dataclasses.replace(WEIGHTS, activations_until=4),
}


def residency(name: str, *, in_phases: bool = False, model: ModelSpec | None = None, seq_length: int = 16) -> Plan:
    """Copies of a stage with that on their hosts: two, or four that are summed in two domains."""
    dp = 4 if in_phases else 2
    held = stage(layers=(0, 4), ranks=range(dp), dp=dp)
    made = sharded(plan(model or llama_model(num_layers=4), [replica(held, num_samples=2 * dp)], seq_length=seq_length))
    made = made.with_replicas({0: made.replicas[0].with_stage(0, offload=RESIDENCIES[name])})
    if in_phases:
        made = dataclasses.replace(
            made, gradient_sync=dataclasses.replace(made.gradient_sync, domains=((0, 1), (2, 3)))
        )
    validate(made)
    return made


def streams_of_a_rank(rank: int, made: Plan) -> int:
    """Streams that a rank takes from torch's pool to train, and to copy its state for recovery."""

    def copy_state(trainer: Trainer, rank: int) -> None:
        staging = _Staging(torch.device("cpu"), list(trainer.optimizer.state(owner=None)))
        staging.stage()
        staging.wait_until_staged()

    with played_cuda() as played:
        train(rank, made, 1, SMALL_BUCKETS, prepare=copy_state)
        return len(played.streams)


@pytest.mark.parametrize(("name", "in_phases"), [(name, False) for name in RESIDENCIES] + [("everything", True)])
def test_a_rank_has_a_stream_for_each_of_its_roles(name: str, in_phases: bool) -> None:
    made = residency(name, in_phases=in_phases)
    roles = stream_roles(made.replicas[0].stages, sums_in_phases=in_phases)
    assert run_ranks(streams_of_a_rank, made.world_size, made) == [len(roles)] * made.world_size
    assert len(roles) <= MAX_STREAMS


def test_all_roles_together_are_few() -> None:
    made = residency("everything", in_phases=True)
    assert stream_roles(made.replicas[0].stages, sums_in_phases=True) == set(StreamRole)
    assert len(StreamRole) == MAX_STREAMS


def train_with_streams(rank: int, made: Plan) -> Trace | None:
    with played_cuda():
        return train(rank, made, NUM_STEPS, SMALL_BUCKETS, weights_at="the end")


def train_without(rank: int, made: Plan) -> Trace | None:
    return train(rank, made, NUM_STEPS, SMALL_BUCKETS, weights_at="the end")


IN_TURNS = [
    pytest.param(name, marks=[] if name == "everything" else pytest.mark.rotates("late copies")) for name in RESIDENCIES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TURNS)
def test_nothing_reads_what_is_still_on_its_way(name: str) -> None:
    made = residency(name)
    both = (run_ranks(each, made.world_size, made) for each in (train_without, train_with_streams))
    for expected, found in zip(*both, strict=True):
        assert found.losses == expected.losses
        for weight, values in expected.weights[-1].items():
            np.testing.assert_array_equal(found.weights[-1][weight], values, err_msg=weight)


@dataclasses.dataclass(frozen=True)
class Pinned:
    """Bytes of a rank's pinned regions, without those of its microbatches: each of them, before the first step and
    after the last."""

    before: list[int]
    after: list[int]


def pinned_of(rank: int, made: Plan) -> Pinned:
    """Train with a warm-up, as on CUDA, and let nothing pin memory from the first compute of a step to its sums."""
    found: list[list[int]] = []

    def forbid_pinning(trainer: Trainer, rank: int) -> None:
        executor: Any = trainer._executor
        runs = executor.run
        found.append(list(played.registered.values()))

        def run(inputs: StepInputs) -> torch.Tensor:
            executor._activations.begin()
            played.forbidden = "in a step"
            try:
                loss: torch.Tensor = runs(inputs)
            finally:
                played.forbidden = ""
            found.append(list(played.registered.values()))
            return loss

        executor.run = run

    with played_cuda() as played, mock.patch.object(trainer_module, "runs_cuda", return_value=True):
        train(rank, made, NUM_STEPS, LARGE_BUCKETS, prepare=forbid_pinning)
    # The last region is that of the staging buffers.
    return Pinned(before=found[0], after=found[-1][:-1])


LARGE_BUCKETS = DataParallelOptions(bucket_numel=60_000, overlap_param_gather=True)
WIDE = gpt2_model(
    num_layers=4, hidden_size=96, kv_channels=24, ffn_hidden_size=272, vocab_size=700, padded_vocab_size=704
)


@pytest.mark.parametrize("name", [name for name in RESIDENCIES if name != "nothing"])
def test_what_is_pinned_is_what_is_predicted(name: str) -> None:
    """Of a model whose regions powers of two would make a fifth larger, at least."""
    made = residency(name, model=WIDE, seq_length=36)
    predicted = predicted_pinned(made)
    for rank, pinned in enumerate(run_ranks(pinned_of, made.world_size, made)):
        assert pinned.before == pinned.after, "of a dense model the warm-up knows all"
        assert sum(pinned.before) == pytest.approx(predicted[rank], rel=0.05)
        assert sum(2 ** (size - 1).bit_length() for size in pinned.before) > 1.2 * predicted[rank]


def predicted_pinned(made: Plan) -> dict[int, int]:
    """Bytes of each rank: weights as on a GPU, and activations that the kernels of a CPU save."""
    on_gpus = made.with_replicas({0: made.replicas[0].with_each_stage(device=["A100-40"])})
    on_cpus, of_gpus = (host_memory_of_ranks(each, memory_costs(each)) for each in (made, on_gpus))
    return {
        rank: dataclasses.replace(of_gpus[rank], activations=taken.activations).pinned
        for rank, taken in on_cpus.items()
    }


@pytest.mark.slow
def test_experts_that_save_more_than_before_have_pageable_memory_for_a_step() -> None:
    """Nothing is pinned in a step, the bits are those of activations that stay, and the memory grows between steps. The
    smaller memory is given back then, while the update of the last step is under way."""
    made = residency("activations", model=moe_model(num_layers=4), seq_length=48)
    kept = residency("nothing", model=moe_model(num_layers=4), seq_length=48)
    for grown, expected in zip(
        run_ranks(grown_of, made.world_size, made), run_ranks(train_without, made.world_size, kept), strict=True
    ):
        assert grown.losses == expected.losses
        assert grown.pageable_bytes[0] > 0 == grown.pageable_bytes[-1]
        assert grown.pinned_regions[0] == grown.pinned_regions[-1]


@dataclasses.dataclass(frozen=True)
class Grown:
    """Losses, the bytes of each step that went through pageable memory, and how many pinned regions it had."""

    losses: list[float]
    pageable_bytes: list[int]
    pinned_regions: list[int]


def grown_of(rank: int, made: Plan) -> Grown:
    """Train after a warm-up in which every block has seemed to save half of what it does."""
    found: list[int] = []
    regions: list[int] = []

    def watch(trainer: Trainer, rank: int) -> None:
        slots: Any = trainer.host_activations._slots
        slots._saved = {key: num_bytes // 2 for key, num_bytes in slots._saved.items()}
        slots._free.clear()
        executor: Any = trainer._executor
        runs, take = executor.run, slots.take

        def count(key: BlockKey, sizes: Sequence[int]) -> Taken:
            taken: Taken = take(key, sizes)
            found[-1] += sum(part.nbytes for part in taken.parts if not played.is_pinned(part))
            return taken

        def run(inputs: StepInputs) -> torch.Tensor:
            # By the update of the step before.
            played.is_busy = True
            executor._activations.begin()
            found.append(0)
            regions.append(len(played.registered))
            played.forbidden = "in a step"
            try:
                loss: torch.Tensor = runs(inputs)
            finally:
                played.forbidden = ""
            return loss

        executor.run, slots.take = run, count

    with played_cuda() as played, mock.patch.object(trainer_module, "runs_cuda", return_value=True):
        trace = train(rank, made, NUM_STEPS, SMALL_BUCKETS, weights_at="the end", prepare=watch)
    assert trace is not None
    return Grown(trace.losses, found, regions)
