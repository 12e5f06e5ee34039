"""The auxiliary losses that spread tokens over experts: their share of the gradient under any plan and precision."""

import dataclasses
from collections.abc import Callable

import pytest

from hetero.plan.ir import Plan
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import AuxiliaryLoss, StageOptions
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import moe_model
from tests.helpers.plans import deep_enough, plan, replica, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, Training, one_process, one_process_plan, train, trained

pytestmark = pytest.mark.dist

NUM_STEPS = 2
MODEL = moe_model(num_layers=3)


def strong(loss: AuxiliaryLoss) -> StageOptions:
    """Large enough that no tolerance hides it."""
    return StageOptions(init_method_std=0.1, moe_router_load_balancing=loss, moe_aux_loss_coeff=1.0)


def unequal_shares(*, mbs: tuple[int, int, int] = (1, 1, 1), num_samples: tuple[int, int] = (3, 1)) -> Plan:
    """Two replicas. ``mbs`` is of the two stages of the first one, and of the only stage of the second."""
    first = replica(
        stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True, mbs=mbs[0]),
        stage(layers=(1, 3), ranks=(2,), mbs=mbs[1]),
        num_samples=num_samples[0],
    )
    second = replica(stage(layers=(0, 3), ranks=(3,), mbs=mbs[2]), num_samples=num_samples[1])
    return plan(MODEL, [deep_enough(first), second], precision="fp64")


def pairs() -> Plan:
    """Two samples in each microbatch, of pipeline stages, data-parallel ranks and a layer that is computed again."""
    first = replica(
        stage(layers=(0, 1), ranks=(0, 1), dp=2, mbs=2),
        stage(layers=(1, 3), ranks=(2,), mbs=2, recompute="full"),
        num_samples=8,
    )
    return plan(MODEL, [first, replica(stage(layers=(0, 3), ranks=(3,), mbs=2), num_samples=4)], precision="fp64")


def fives() -> Plan:
    """Shares of 5/9 and 1/9: divided by 5, the first is not the second in float32."""
    return unequal_shares(mbs=(5, 1, 4), num_samples=(5, 4))


def twos_and_fours() -> Plan:
    return unequal_shares(mbs=(2, 1, 4), num_samples=(4, 4))


def traces(made: Plan, options: StageOptions) -> list[Trace | None]:
    return run_ranks(train, made.world_size, made, NUM_STEPS, SMALL_BUCKETS, options)


@pytest.mark.slow
@pytest.mark.parametrize("made", [unequal_shares, pairs])
def test_a_loss_of_each_microbatch_is_that_of_one_process_with_these_microbatches(made: Callable[[], Plan]) -> None:
    ours, options = made(), strong("aux_loss")
    (size,) = ours.micro_batch_sizes
    alone: Trace = run_alone(train, one_process_plan(ours, micro_batch_size=size), NUM_STEPS, SMALL_BUCKETS, options)
    assert alone.grad_norms[0] > 1.1 * one_process(ours, 1).grad_norms[0]
    assert_same_training(ours, traces(ours, options), alone, tolerance=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("made", [twos_and_fours, fives, pairs])
def test_a_loss_of_each_sequence_is_that_of_one_process(made: Callable[[], Plan]) -> None:
    """Whatever the microbatches of plan and process, and with sequence parallelism."""
    ours, options = made(), strong("seq_aux_loss")
    alone: Trace = run_alone(train, one_process_plan(ours), NUM_STEPS, SMALL_BUCKETS, options)
    assert alone.grad_norms[0] > 1.1 * one_process(ours, 1).grad_norms[0]
    assert_same_training(ours, traces(ours, options), alone, tolerance=1e-9)


@pytest.mark.slow
def test_a_loss_of_each_microbatch_depends_on_their_size() -> None:
    """What start-up, verify_plan and the docs say of it."""
    options = strong("aux_loss")
    ones, twos = (
        run_alone(train, one_process_plan(pairs(), micro_batch_size=size), 1, SMALL_BUCKETS, options) for size in (1, 2)
    )
    assert ones.losses == pytest.approx(twos.losses, rel=1e-12), "the loss of tokens is the same in the first step"
    assert ones.grad_norms != pytest.approx(twos.grad_norms, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss"])
def test_it_is_scaled_with_the_loss(loss: AuxiliaryLoss) -> None:
    one = dataclasses.replace(one_process_plan(unequal_shares()), precision="fp16")
    scales = {str(scale): LossScaleOptions(constant=scale) for scale in (1.0, 2.0**7)}
    trainings = {name: Training(one, SMALL_BUCKETS, strong(loss), scale) for name, scale in scales.items()}
    first, second = (trace.grad_norms[0] for (trace,) in trained(trainings, 1).values() if trace is not None)
    assert first == pytest.approx(second, rel=0.02)
