"""Ranks that hold several stages train as one process does.

In float64, to 1e-9 relative to the largest element of each tensor, over three clipped AdamW steps.
"""

import dataclasses
from pathlib import Path

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.dist.test_resume import END, HALF, run
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, microbatches, one_process, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NUM_STEPS = 3
TOLERANCE = 1e-9
SHARDED = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)


def in_float64(made: Plan) -> Plan:
    return dataclasses.replace(made, precision="fp64")


def two_groups() -> Plan:
    """Two stages on each of two ranks, five microbatches in rounds of two."""
    cuts, depths = ((0, 2), (2, 3), (3, 5), (5, 6)), (3, 2, 2, 1)
    stages = (
        stage(layers=cut, ranks=(s % 2,), depth=depth) for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
    )
    return plan(llama_model(), [replica(*stages, num_samples=5)])


def unequal_tp() -> Plan:
    """Experts, split backwards on one group, three stages on the other."""
    one = {"ranks": (0, 1), "tp": 2, "sp": True, "delay": 1}
    other = {"ranks": (2,)}
    stages = (
        stage(layers=(0, 1), depth=3, **one),
        stage(layers=(1, 2), depth=3, **other),
        stage(layers=(2, 4), depth=2, **one),
        stage(layers=(4, 5), depth=2, **other),
        stage(layers=(5, 6), depth=1, **one),
    )
    return plan(moe_model(), [replica(*stages, num_samples=4)])


def tied_halves() -> Plan:
    """A tied embedding on two groups, cuts inside of layers, data parallelism, unequal shares of the optimizer."""
    cuts, depths = ((0, 1.5), (1.5, 3), (3, 4.5), (4.5, 6)), (2, 2, 2, 1)
    stages = [
        stage(layers=cut, ranks=((0, 1), (2, 3))[s % 2], dp=2, depth=depth)
        for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
    ]
    stages = [dataclasses.replace(each, optimizer_share=1 + s % 2) for s, each in enumerate(stages)]
    return sharded(plan(gpt2_model(), [replica(*stages, num_samples=8)]))


def beside_another() -> Plan:
    """Of two replicas one interleaves; the other has tensor parallelism, other cuts and one stage per rank."""
    cuts, depths = ((0, 1), (1, 4), (4, 5), (5, 6)), (3, 2, 2, 1)
    interleaved = replica(
        *(
            stage(layers=cut, ranks=(3 + s % 2,), depth=depth)
            for s, (cut, depth) in enumerate(zip(cuts, depths, strict=True))
        ),
        num_samples=4,
    )
    other = replica(
        stage(layers=(0, 3), ranks=(0, 2), tp=2, sp=True), stage(layers=(3, 6), ranks=(1,), mbs=2), num_samples=4
    )
    return plan(gpt2_model(), [interleaved, other], idle_ranks=(5,))


PLANS = {
    "two-groups": in_float64(two_groups()),
    "unequal-tp": in_float64(unequal_tp()),
    "tied-halves": in_float64(tied_halves()),
    "beside-another": in_float64(beside_another()),
    "beside-another-sharded": in_float64(sharded(beside_another())),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "beside-another" else pytest.mark.slow) for name in PLANS]
)
def test_interleaved_stages_equal_one_process(name: str) -> None:
    made = PLANS[name]
    validate(made)
    assert any(each.is_interleaved for each in made.replicas)
    options = SHARDED if made.distributed_optimizer else SMALL_BUCKETS
    traces = run_ranks(train, made.world_size, made, NUM_STEPS, options)
    assert_same_training(made, traces, one_process(made, NUM_STEPS), tolerance=TOLERANCE)


def losses_around_a_step(rank: int, made: Plan) -> list[tuple[float, int]]:
    """Evaluate a batch, train on another, and evaluate the first again."""
    context = create_groups(made, device=torch.device("cpu"))
    options = StageOptions(init_method_std=0.1)
    trainer = Trainer(context, options=options, adam=ADAM, seed=7, data_parallel=SHARDED)
    first, second = (microbatches(made, rank, step=step) if reads_data(context) else None for step in (0, 1))
    losses = [trainer.evaluate(second)]
    trainer.step(first)
    return [*losses, trainer.evaluate(second)]


@pytest.mark.slow
def test_an_evaluation_is_one_processs() -> None:
    made = PLANS["beside-another-sharded"]
    expected = run_alone(losses_around_a_step, one_process_plan(made))
    for losses in run_ranks(losses_around_a_step, made.world_size, made):
        for (loss, tokens), (one_loss, one_tokens) in zip(losses, expected, strict=True):
            assert tokens == one_tokens
            assert loss == pytest.approx(one_loss, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("saved_interleaved", [True, False])
def test_a_run_goes_on_with_and_without_interleaving(saved_interleaved: bool, tmp_path: Path) -> None:
    """Under the other plan, from the half: the losses of one process."""
    interleaved = PLANS["beside-another"]
    stages = stage(layers=(0, 4), ranks=(0,)), stage(layers=(4, 6), ranks=(1,))
    other = in_float64(plan(gpt2_model(), [replica(*stages, num_samples=interleaved.global_batch_size)]))
    first, second = (interleaved, other) if saved_interleaved else (other, interleaved)
    run(first, sharded=True, end_step=HALF, save=str(tmp_path))
    resumed = run(second, sharded=True, end_step=END, load=str(tmp_path))
    (alone,) = run(one_process_plan(second), sharded=False, end_step=END)
    for mine in resumed:
        assert mine.start_step == HALF
        assert mine.losses == pytest.approx(alone.losses[HALF:], rel=TOLERANCE)
