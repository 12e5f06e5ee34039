"""bf16 and fp16: near the fp32 oracle, one decision about an overflow, full precision in everything that adds up."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Precision
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.optimizer import StepResult
from hetero.runtime.options import StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from hetero.spec.parameters import parameters
from tests.helpers.comparison import GRADIENT_BOUND, LOSS_BOUND, assembled, shard
from tests.helpers.layouts import layouts
from tests.helpers.plans import sharded
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    ADAM,
    SMALL_BUCKETS,
    Trace,
    data_of,
    microbatches,
    one_process,
    one_process_plan,
    spoil_gradient,
    train,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NUM_STEPS = 3
SHARDED = dataclasses.replace(SMALL_BUCKETS, overlap_param_gather=True)
CHOSEN = [
    (f"{name}-{style}", plan)
    for name, style, plan in layouts()
    if (name, style) in (("everything", "gpt2-tied"), ("everything", "llama-gqa"), ("moe", "moe"))
]


def in_precision(plan: Plan, precision: Precision) -> Plan:
    return dataclasses.replace(plan, precision=precision)


def _cases() -> Iterator[Any]:
    """Each precision with and without a shared optimizer, one of the four in each run and under one of the layouts."""
    for precision, distributed in itertools.product(("bf16", "fp16"), (False, True)):
        how = f"{precision}-{'distributed' if distributed else 'all-reduce'}"
        for name, plan in CHOSEN:
            row = pytest.mark.rotates(how, every=4, turn=2 * (precision == "fp16") + distributed)
            yield pytest.param(plan, precision, distributed, id=f"{name}-{how}", marks=row)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "precision", "distributed"), list(_cases()))
def test_half_precision_is_near_the_fp32_oracle(plan: Plan, precision: Precision, distributed: bool) -> None:
    """Every step's loss is that of one process with the same weights, in fp32. Trained for itself, one process gets the
    same losses, too, but for experts: rounding sends a token to another one, and two updates later that is more than
    rounding, on some processors.
    """
    plan, expected = in_precision(plan, precision), one_process(in_precision(plan, "fp32"), NUM_STEPS)
    plan, data_parallel = (sharded(plan), SHARDED) if distributed else (plan, SMALL_BUCKETS)
    scale = LossScaleOptions(constant=2.0**10)
    ranks = run_ranks(train, plan.world_size, plan, NUM_STEPS, data_parallel, None, scale)
    traces = [trace for trace in ranks if trace is not None]
    comparable = NUM_STEPS if plan.model.num_experts is None else 1
    begins_with = [None, *(whole_weights(plan, traces, step) for step in range(NUM_STEPS - 1))]
    (with_the_same_weights,) = run_ranks(losses_with, 1, in_precision(one_process_plan(plan), "fp32"), begins_with)
    for trace in traces:
        assert trace.losses == pytest.approx(with_the_same_weights, rel=LOSS_BOUND[precision])
        assert trace.losses[:comparable] == pytest.approx(expected.losses[:comparable], rel=LOSS_BOUND[precision])
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    found = assembled([box for trace in traces for box in trace.gradients[0]], by_name)
    wanted = assembled(expected.gradients[0], by_name)
    factor = scale.constant if precision == "fp16" else 1.0
    difference = sum(float(((found[n] / factor - wanted[n]) ** 2).sum()) for n in wanted) ** 0.5
    assert difference <= GRADIENT_BOUND[precision] * expected.grad_norms[0]
    assert difference > 0, "this was not half precision"


Weights = dict[str, np.ndarray]


def whole_weights(plan: Plan, traces: list[Trace], step: int) -> Weights:
    """The weights of the model after ``step``, put together from what the ranks hold."""
    whole: Weights = {}
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    for trace in traces:
        for name, weight in trace.weights[step].items():
            full = whole.setdefault(name, np.full(by_name[name].shape, np.nan))
            places = shard(np.arange(full.size).reshape(full.shape), by_name[name], trace)
            full.reshape(-1)[places] = weight
    assert not any(np.isnan(full).any() for full in whole.values())
    return whole


def losses_with(rank: int, plan: Plan, begins_with: list[Weights | None]) -> list[float]:
    """The loss of each step's batch with the weights that it begins with; ``None`` for those drawn at the start."""
    trainer = Trainer(
        create_groups(plan, device=torch.device("cpu")),
        options=StageOptions(init_method_std=0.1),
        adam=ADAM,
        seed=7,
        data_parallel=SMALL_BUCKETS,
    )
    losses = []
    for step, weights in enumerate(begins_with):
        for name, values in (weights or {}).items():
            trainer.parameters[name][1].data.copy_(torch.from_numpy(values))
        loss_sum, num_tokens = trainer.evaluate(microbatches(plan, rank, step=step))
        losses.append(loss_sum / num_tokens)
    return losses


@pytest.mark.slow
@pytest.mark.rotates("precisions", every=2, turn=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_updates_are_not_lost(precision: Precision) -> None:
    """An update of a thousandth is below half of bf16's last bit: only master weights can add a hundred of them up."""
    _, plan = CHOSEN[0]
    ranks = run_ranks(many_small_updates, plan.world_size, sharded(in_precision(plan, precision)), precision)
    moved = [each for each in ranks if each is not None]
    assert moved
    for before, after in moved:
        assert after == pytest.approx(before * (1 - 1e-3) ** 100, rel=2**-8)


def many_small_updates(rank: int, plan: Plan, precision: Precision) -> tuple[float, float] | None:
    """The norm of a matrix before and after a hundred steps that only decay weights, by a thousandth."""
    context = create_groups(plan, device=torch.device("cpu"))
    adam = dataclasses.replace(ADAM, lr=1e-2, weight_decay=0.1)
    trainer = Trainer(context, options=StageOptions(), adam=adam, seed=7, data_parallel=SHARDED)
    matrices = [tensor for parameter, tensor in trainer.parameters.values() if parameter.decays]
    before = float(matrices[0].detach().double().norm()) if matrices else 0.0
    for _ in range(100):
        trainer.update()
    trainer.finish_gather()
    return (before, float(matrices[0].detach().double().norm())) if matrices else None


def overflow_on_one_rank(rank: int, plan: Plan, bad_rank: int) -> tuple[list[StepResult], list[dict[str, np.ndarray]]]:
    """Four steps in fp16; in the second and third, one rank's gradient is infinite."""
    context = create_groups(plan, device=torch.device("cpu"))
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=0.1),
        adam=ADAM,
        seed=7,
        data_parallel=SHARDED,
        loss_scale=LossScaleOptions(initial=2.0**12, window=1, hysteresis=2),
    )
    session = TrainingSession(context, trainer, data=data_of(context))
    results, weights = [], []
    for step in range(4):
        hook = None
        if rank == bad_rank and step in (1, 2):
            hook = spoil_gradient(trainer, next(iter(trainer.parameters)), torch.inf)
        results.append(session.step())
        if hook is not None:
            hook.remove()
        weights.append({name: tensor.double().numpy() for name, tensor in session.weights().items()})
    return results, weights


@pytest.mark.slow
def test_an_overflow_on_one_rank_is_everybodys() -> None:
    """All ranks skip together and move the scale alike: doubled after a clean step, halved at the second overflow."""
    plan = sharded(in_precision(CHOSEN[0][1], "fp16"))
    bad_rank = plan.replicas[0].stages[0].ranks[0]
    ranks = run_ranks(overflow_on_one_rank, plan.world_size, plan, bad_rank)
    for results, weights in ranks:
        assert [result.skipped for result in results] == [False, True, True, False]
        assert [result.loss_scale for result in results] == [2.0**12, 2.0**13, 2.0**13, 2.0**12]
        assert [result.loss for result in results] == [result.loss for result in ranks[0][0]]
        for name in weights[0]:
            np.testing.assert_array_equal(weights[1][name], weights[0][name])
            np.testing.assert_array_equal(weights[2][name], weights[0][name])
            assert (weights[3][name] != weights[2][name]).any()


@pytest.mark.slow
def test_ranks_hold_the_same_half_precision_weights() -> None:
    """What two ranks both hold is equal bit for bit after sharded updates."""
    plan = sharded(in_precision(CHOSEN[0][1], "bf16"))
    traces = [t for t in run_ranks(train, plan.world_size, plan, NUM_STEPS, SHARDED) if t is not None]
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    whole: dict[str, np.ndarray] = {}
    for trace in traces:
        for name, weight in trace.weights[-1].items():
            parameter = by_name[name]
            full = whole.setdefault(name, np.full(parameter.shape, np.nan))
            indices = np.arange(full.size).reshape(full.shape)
            mine = shard(indices, parameter, trace)
            seen = full.reshape(-1)[mine]
            np.testing.assert_array_equal(weight[~np.isnan(seen)], seen[~np.isnan(seen)], name)
            full.reshape(-1)[mine] = weight
