"""A run goes on from another plan's checkpoint as if nothing had happened."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetero.checkpoint.reader import load_checkpoint
from hetero.checkpoint.state import CheckpointState
from hetero.checkpoint.writer import CheckpointWriter
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.layouts import layouts
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, microbatches

pytestmark = pytest.mark.dist

PLANS = {(name, style): plan for name, style, plan in layouts()}
NUM_STEPS, SAVED_STEP = 3, 1

Outcome = list[tuple[float, float]]
"""Loss and gradient norm of every step."""


def run(
    rank: int, plan: Plan, folder: Path, start_step: int, end_step: int, sharded: bool, save_at: int | None
) -> Outcome:
    """Steps ``[start_step, end_step)`` on one rank, from the checkpoint of ``start_step`` if that is not 0."""
    context = create_groups(plan, device=torch.device("cpu"))
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=0.1),
        adam=ADAM,
        # Whoever loads has started from other weights.
        seed=7 + start_step,
        data_parallel=DataParallelOptions(bucket_numel=3000, distributed_optimizer=sharded),
    )
    writer = CheckpointWriter(folder, world=dist.group.WORLD, start_step=start_step, keep_last=None, asynchronous=True)
    if start_step:
        slices = trainer.optimizer.state(owned=False)
        loaded = load_checkpoint(folder, step=start_step, slices=slices, plan=plan, rank=rank)
        trainer.optimizer.finish_loading(num_updates=loaded.state.adam_step)
    outcome = []
    for step in range(start_step, end_step):
        result = trainer.step(microbatches(plan, rank, step=step) if reads_data(context) else None)
        outcome.append((result.loss, result.grad_norm))
        if step + 1 == save_at:
            trainer.finish_gather()
            state = CheckpointState(
                step=save_at, model=plan.model, precision=plan.precision, plan=plan, adam_step=save_at
            )
            writer.save(step=save_at, slices=trainer.optimizer.state(owned=True), state=state)
    writer.wait()
    return outcome


@pytest.mark.parametrize(
    ("style", "saving", "loading", "sharded"),
    [
        ("gpt2-tied", "tp-1|2|4-sp", "one-stage", True),
        ("llama-gqa", "same-layer-tp-2+4", "dp-2|4", False),
    ],
)
def test_any_plan_continues_any_others_run(
    tmp_path: Path, style: str, saving: str, loading: str, sharded: bool
) -> None:
    """In float64, where only the order of summation differs; the optimizer is sharded on one side only."""
    first, second = PLANS[saving, style], PLANS[loading, style]
    whole = run_ranks(run, first.world_size, first, tmp_path, 0, NUM_STEPS, sharded, SAVED_STEP)[0]
    rest = run_ranks(run, second.world_size, second, tmp_path, SAVED_STEP, NUM_STEPS, not sharded, None)[0]
    assert rest == [pytest.approx(each, rel=1e-10) for each in whole[SAVED_STEP:]]


def test_the_same_plan_continues_to_the_bit(tmp_path: Path) -> None:
    """In bf16: the weights alone would have lost what the master weights hold."""
    plan = dataclasses.replace(PLANS["tp-2|1", "llama-gqa"], precision="bf16")
    whole = run_ranks(run, plan.world_size, plan, tmp_path, 0, NUM_STEPS, True, SAVED_STEP)[0]
    rest = run_ranks(run, plan.world_size, plan, tmp_path, SAVED_STEP, NUM_STEPS, True, None)[0]
    assert rest == whole[SAVED_STEP:]
