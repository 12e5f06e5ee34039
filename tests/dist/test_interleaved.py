"""Ranks that hold several stages train as one process does.

In float64, to 1e-9 relative to the largest element of each tensor, over three clipped AdamW steps.
"""

from pathlib import Path

import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.dist.interleaved_plans import PLANS, in_float64
from tests.dist.resumed_runs import END, HALF, run
from tests.helpers.cases import slow
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, microbatches, one_process, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NUM_STEPS = 3
TOLERANCE = 1e-9
SHARDED = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)


@pytest.mark.parametrize(
    "name", ["beside-another", *slow(*(name for name in PLANS if name != "beside-another"), rotates="plans")]
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
@pytest.mark.rotates(every=2, turn=0)
def test_an_evaluation_is_one_processs() -> None:
    made = PLANS["beside-another-sharded"]
    expected = run_alone(losses_around_a_step, one_process_plan(made))
    for losses in run_ranks(losses_around_a_step, made.world_size, made):
        for (loss, tokens), (one_loss, one_tokens) in zip(losses, expected, strict=True):
            assert tokens == one_tokens
            assert loss == pytest.approx(one_loss, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.rotates("ways")
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
