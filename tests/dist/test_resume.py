"""Any plan loads any other plan's checkpoint and goes on as if it had trained from the start."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero.checkpoint.folder import find_checkpoint
from hetero.checkpoint.reader import SavedTensors
from hetero.plan.ir import Plan
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.parameters import parameters
from tests.dist.resumed_runs import END, HALF, run
from tests.helpers.comparison import shard
from tests.helpers.host_training import left_to_hosts, weights_to_hosts
from tests.helpers.layouts import layout
from tests.helpers.plans import with_batch, with_shares
from tests.helpers.sessions import Session
from tests.helpers.training import one_process_plan, trace_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Train under ``first`` to the half, then under ``second``; the second's flags say more of it."""

    first: Plan
    second: Plan
    first_sharded: bool = True
    second_sharded: bool = True


def pair(style: str, first: str, second: str, *, sharded: tuple[bool, bool] = (True, True)) -> Pair:
    a, b = layout(first, style), layout(second, style)
    batch = max(a.global_batch_size, b.global_batch_size)
    return Pair(with_batch(a, batch), with_batch(b, batch), *sharded)


GPT, LLAMA = "gpt2-tied", "llama-gqa"


def left_to_hosts_at(*, first: bool) -> Pair:
    """Hosts have what the one leg's devices update."""
    made = pair(LLAMA, "everything", "four-stages")
    if first:
        return dataclasses.replace(made, first=left_to_hosts(made.first, speculate=True))
    return dataclasses.replace(made, second=left_to_hosts(made.second, speculate=False))


def weights_on_hosts() -> Pair:
    """Both legs leave weights to their hosts, and not the same ones."""
    made = pair(LLAMA, "everything", "four-stages")
    first, second = (
        weights_to_hosts(each, turn=turn, speculate=False) for turn, each in enumerate((made.first, made.second))
    )
    return dataclasses.replace(made, first=first, second=second)


PAIRS = {
    "more-layers-in-front": pair(LLAMA, "uneven-layers", "four-stages"),
    "one-rank-and-many": pair(GPT, "one-stage", "everything"),
    "many-and-one-rank": pair(LLAMA, "everything", "one-stage", sharded=(True, False)),
    "tp-1-2-4-and-4-2-1": pair(GPT, "tp-1|2|4", "tp-4sp|2|1"),
    "tp-2-1-and-2-4-2": pair(LLAMA, "tp-2|1", "tp-2|4|2-sp", sharded=(False, True)),
    "dp-and-tp": pair(LLAMA, "dp-2|4", "tp-1|2|4-sp"),
    "tied-copies-apart-and-together": pair(GPT, "four-stages", "one-stage-tp4-sp"),
    "replicas-and-idle-ranks": pair(GPT, "same-layer-tp-2+4", "idle-ranks"),
    "shares-and-depths": pair(LLAMA, "shares-5:3:1", "depths-1+2+3", sharded=(False, False)),
    "experts": pair("moe", "moe", "moe", sharded=(True, False)),
    "halves-and-whole-layers": pair(GPT, "half-cuts", "uneven-layers"),
    "whole-layers-and-halves": pair(LLAMA, "four-stages", "half-cut-and-whole", sharded=(False, True)),
    "other-halves": pair("moe", "half-cuts", "half-cut-and-whole"),
    "from-hosts-to-devices": left_to_hosts_at(first=True),
    "from-devices-to-hosts": left_to_hosts_at(first=False),
    "other-weights-on-hosts": weights_on_hosts(),
    "unequal-shares": Pair(
        layout("everything", LLAMA),
        with_shares(layout("everything", LLAMA), (2, 5, 2, 5, 8)),
    ),
}


def saved(folder: Path, plan: Plan, step: int) -> dict[str, np.ndarray]:
    """Whole tensors of a checkpoint."""
    slices = [
        TensorSlice(
            name=f"{kind}/{parameter.name}",
            shape=parameter.shape,
            offsets=(0,) * len(parameter.shape),
            tensor=torch.full(parameter.shape, torch.nan, dtype=torch.float64),
        )
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for parameter in parameters(plan.model)
    ]
    SavedTensors(find_checkpoint(folder, step)).fill(slices)
    return {each.name: each.tensor.numpy() for each in slices}


def assert_same_state(ours: list[Session], theirs: list[Session]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.state.keys() == other.state.keys()
        for name, values in mine.state.items():
            np.testing.assert_array_equal(values, other.state[name], name)
        for name, values in mine.weights.items():
            np.testing.assert_array_equal(values, other.weights[name], name)


ONTO_HOSTS = "from-devices-to-hosts"
"""In every whole run: no other pair has hosts that begin with a state that was loaded."""

FAST, ROW = "shares-and-depths", 5
"""What every run has, the fast one too; of every five of the others each second run takes one."""


def _cases() -> Iterator[Any]:
    others = [name for name in PAIRS if name not in (FAST, ONTO_HOSTS)]
    for i, name in enumerate(others):
        row = pytest.mark.rotates(f"beside {others[i - i % ROW]}", every=2, turn=i // ROW % 2)
        yield pytest.param(name, marks=(pytest.mark.slow, row))
    yield pytest.param(ONTO_HOSTS, marks=pytest.mark.slow)
    yield FAST


@pytest.mark.parametrize("name", list(_cases()))
def test_another_plan_goes_on(name: str, tmp_path: Path) -> None:
    """A -> B -> A is bit-exact; A's first half and B's second are the loss curve of an uninterrupted run."""
    case = PAIRS[name]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first = run(case.first, sharded=case.first_sharded, end_step=HALF, save=a)
    resumed = run(case.second, sharded=case.second_sharded, end_step=END, load=a, save=b)
    back = run(case.first, sharded=case.first_sharded, end_step=HALF, load=b, ckpt_step=str(HALF))
    assert [each.start_step for each in back] == [HALF] * case.first.world_size
    assert_same_state(back, first)
    there, here = saved(Path(a), case.first, HALF), saved(Path(b), case.second, HALF)
    for tensor, values in there.items():
        np.testing.assert_array_equal(here[tensor], values, tensor)

    alone = uninterrupted(one_process_plan(case.second))
    by_name = {parameter.name: parameter for parameter in parameters(case.second.model)}
    for rank, mine in enumerate(resumed):
        assert mine.losses == pytest.approx(alone.losses[HALF:], rel=1e-9)
        assert mine.next_lr == alone.next_lr
        for tensor, values in mine.weights.items():
            whole = alone.weights[tensor]
            expected = shard(whole, by_name[tensor], trace_of(case.second, rank))
            np.testing.assert_allclose(values, expected, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=tensor)


@functools.cache
def uninterrupted(plan: Plan) -> Session:
    """One process from the start to the end."""
    (alone,) = run(plan, sharded=False, end_step=END)
    return alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        "fp16",
        *(pytest.param(each, marks=pytest.mark.rotates("bit by bit", every=2, turn=0)) for each in ("fp64", "bf16")),
    ],
)
def test_the_same_plan_goes_on_bit_by_bit(precision: str, tmp_path: Path) -> None:
    """With dropout, sharded state, a background save, and in fp16 with its loss scale."""
    made = dataclasses.replace(layout("everything", GPT), precision=precision)
    flags = {"attention_dropout": "0.1", "hidden_dropout": "0.1"}
    if precision == "fp16":
        flags |= {"fp16": "", "initial_loss_scale": "256", "loss_scale_window": "3"}
    folder = str(tmp_path)
    alone = run(made, sharded=True, end_step=END, **flags)
    run(made, sharded=True, end_step=HALF, save=folder, async_save="", **flags)
    resumed = run(made, sharded=True, end_step=END, load=folder, **flags)
    assert_same_state(resumed, alone)
    for mine, other in zip(resumed, alone, strict=True):
        assert mine.losses == other.losses[HALF:]
        assert mine.loss_scale == other.loss_scale == (512 if precision == "fp16" else 1)


@pytest.mark.slow
def test_finetuning_takes_the_weights_alone(tmp_path: Path) -> None:
    made = layout("tp-2|1", LLAMA)
    before = run(made, sharded=True, end_step=HALF, save=str(tmp_path))
    tuned = run(one_process_plan(made), sharded=False, end_step=0, load=str(tmp_path), finetune="")
    (one,) = tuned
    assert one.start_step == 0
    weights = saved(tmp_path, made, HALF)
    for name, values in one.weights.items():
        np.testing.assert_array_equal(values, weights[f"weights/{name}"], name)
    assert all(not values.any() for name, values in one.state.items() if name.startswith("exp_avg"))
    assert one.next_lr == pytest.approx(1e-2)
    assert before[0].next_lr < 1e-2
