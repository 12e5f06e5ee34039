"""The auxiliary loss that spreads tokens over experts: its share of the gradient under any plan and precision."""

import dataclasses

import pytest

from hetero.plan.ir import Plan
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, Training, one_process, one_process_plan, train, trained

pytestmark = pytest.mark.dist

NUM_STEPS = 2
MODEL = moe_model(num_layers=3)
STRONG = StageOptions(init_method_std=0.1, moe_router_load_balancing="aux_loss", moe_aux_loss_coeff=1.0)
"""Large enough that no tolerance hides it."""


def unequal_shares() -> Plan:
    """One sample in each microbatch, as in one process: the loss is a mean over microbatches."""
    three = replica(stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True), stage(layers=(1, 3), ranks=(2,)), num_samples=3)
    made = plan(MODEL, [three, replica(stage(layers=(0, 3), ranks=(3,)), num_samples=1)])
    return dataclasses.replace(made, precision="fp64")


@pytest.mark.slow
def test_it_is_one_processs() -> None:
    made = unequal_shares()
    ranks = run_ranks(train, made.world_size, made, NUM_STEPS, SMALL_BUCKETS, STRONG)
    alone: Trace = run_alone(train, one_process_plan(made), NUM_STEPS, SMALL_BUCKETS, STRONG)
    assert alone.grad_norms[0] > 1.1 * one_process(made, 1).grad_norms[0]
    assert_same_training(made, ranks, alone, tolerance=1e-9)


@pytest.mark.slow
def test_it_is_scaled_with_the_loss() -> None:
    one = dataclasses.replace(one_process_plan(unequal_shares()), precision="fp16")
    scales = {str(scale): LossScaleOptions(constant=scale) for scale in (1.0, 2.0**7)}
    trainings = {name: Training(one, SMALL_BUCKETS, STRONG, scale) for name, scale in scales.items()}
    first, second = (trace.grad_norms[0] for (trace,) in trained(trainings, 1).values() if trace is not None)
    assert first == pytest.approx(second, rel=0.02)
