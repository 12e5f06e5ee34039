"""A checkpoint taken for that of another step: its weights, moments and learning rate, with that step's data."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.session import TrainingSession
from hetero.spec.parameters import parameters
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import build_trainer
from tests.dist.resumed_runs import END, HALF, run
from tests.helpers.commands import command_line
from tests.helpers.comparison import shard
from tests.helpers.layouts import layout
from tests.helpers.ranks import run_alone
from tests.helpers.sessions import Session, weights_of
from tests.helpers.training import microbatches, one_process_plan, trace_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


def first_half_twice(rank: int, plan: Plan) -> Session:
    """One process that never stops: the first steps' data come again, while all else goes on."""
    argv = command_line(
        global_batch_size=str(plan.global_batch_size), train_iters=str(END), hetero_plan="p", init_method_std="0.1"
    )
    config = parse_args(argv)
    trainer = build_trainer(config, create_groups(plan, device=torch.device("cpu")))
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    data = (microbatches(plan, rank, step=step % HALF) for step in range(2 * HALF + 1))
    training = TrainingSession(trainer._context, trainer, data=data, schedule=scheduler)
    seen = Session(0)
    seen.results = [training.step() for _ in range(2 * HALF)]
    seen.next_lr, seen.weights = training.learning_rate, weights_of(training)
    return seen


@pytest.mark.slow
def test_a_run_goes_back_to_the_data_of_an_earlier_step(tmp_path: Path) -> None:
    made = layout("everything", "gpt2-tied")
    expected = run_alone(first_half_twice, one_process_plan(made))
    run(made, sharded=True, end_step=HALF, save=str(tmp_path))
    back = {"load": str(tmp_path), "override_ckpt_iteration": "0"}
    by_name = {parameter.name: parameter for parameter in parameters(made.model)}
    for rank, mine in enumerate(run(made, sharded=False, end_step=HALF, **back)):
        assert mine.start_step == 0
        assert mine.losses == pytest.approx(expected.losses[HALF:], rel=1e-9)
        assert mine.next_lr == expected.next_lr
        for name, values in mine.weights.items():
            whole = expected.weights[name]
            wanted = shard(whole, by_name[name], trace_of(made, rank))
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=name)
    with pytest.raises(AssertionError, match=f"it has a checkpoint of step {HALF}, later than step 0 where this run"):
        run(made, sharded=True, end_step=HALF, save=str(tmp_path), **back)
