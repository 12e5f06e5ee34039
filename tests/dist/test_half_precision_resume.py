"""A half-precision run goes on under another plan: what is exact is held bit for bit, what is rounded step by step.

The end of such a run is no measure of it. Plans sum in other orders, so their gradients differ by the rounding of
half precision (1 % in bf16), and training multiplies a difference like any other. In float64, where runs of a tiny
model under unlike plans start 1e-16 apart, they end up 1e-12 apart within ten steps; in bf16, with or without a
checkpoint on the way, that is all of a second moment's largest element (docs/checkpoints.md has the figures).

So nothing here waits for differences to grow. Every step is saved, and starts from a saved state:

1. Loaded state is the saved one bit for bit, on every rank, whatever plan loads it.
2. Every update is AdamW's on that state, to the rounding of float32, at the learning rate and count of its step.
3. Its gradient and its loss are those of one process that starts the step from the same checkpoint, to the rounding of
   half precision.

Together they bound the whole run, and each fault in ``FAULTS`` breaks one of them.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.plan.ir import Plan, Precision
from hetero.runtime import optimizer
from hetero.runtime.optimizer import StepResult
from hetero.runtime.trainer import Trainer
from megatron.pretrain.checkpointing import RunStart
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.training import adam_options
from tests.helpers import sessions, training
from tests.helpers.commands import command_line
from tests.helpers.comparison import GRADIENT_BOUND, LOSS_BOUND, shard
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage, with_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.saved_steps import (
    Saved,
    assert_adamw_step,
    assert_same_state,
    assert_same_tensors,
    assert_weights_are_rounded_masters,
    gradient_distance,
    read_saved,
)
from tests.helpers.sessions import Session, session
from tests.helpers.strategies import is_legal, models, trainable_plans
from tests.helpers.training import one_process_plan, trace_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

HALF, END = 2, 4
LR = 1e-2
OVERFLOWING = 1.5 * 2**20
"""A loss scale at which ``FIRST``, ``SECOND`` and one process overflow; at half of it none does, nor at two thirds."""

EXPERTS_BOUND = 0.15
"""As ``GRADIENT_BOUND``: rounding sends a token that is near a tie to another expert, and the gradient changes by that
token's part, whatever the precision. Of the hundred tokens and more here, one or two do."""


@dataclass(frozen=True)
class Leg:
    """Training under ``plan`` up to ``end_step``.

    first_scale: of the loss in fp16; an overflow halves it, two clean steps double it.
    """

    plan: Plan
    end_step: int
    sharded: bool = True
    overlap: bool = True
    first_scale: float = 2.0**10

    def argv(self, **changes: str | None) -> list[str]:
        """Flags; every step is saved."""
        flags: dict[str, str | None] = {
            "hetero_plan": "given.json",
            "global_batch_size": str(self.plan.global_batch_size),
            "train_iters": str(END),
            "lr": str(LR),
            "lr_decay_style": "linear",
            "init_method_std": "0.1",
            "save_interval": "1",
            "use_distributed_optimizer": "" if self.sharded else None,
            "overlap_param_gather": "" if self.sharded and self.overlap else None,
        }
        if self.plan.precision == "fp16":
            flags |= {
                "fp16": "",
                "initial_loss_scale": str(self.first_scale),
                "loss_scale_window": "2",
                "hysteresis": "1",
            }
        return command_line(**flags | changes)

    def run(self, folder: Path, *, load: Path | None = None, fault: str | None = None) -> list[Session]:
        """What each rank saw."""
        argv = self.argv(load=None if load is None else str(load), save=str(folder))
        made = dataclasses.replace(self.plan, distributed_optimizer=self.sharded)
        return run_ranks(faulty_session, made.world_size, made, argv, self.end_step, fault)


def faulty_session(rank: int, plan: Plan, argv: list[str], end_step: int, fault: str | None) -> Session:
    """A session, in which something goes wrong right after the checkpoint has been loaded."""
    load = sessions.load

    def load_and_spoil(*run: Any, **settings: Any) -> RunStart:
        start = load(*run, **settings)
        if fault is not None:
            _, context, trainer, scheduler = run
            if context.work is not None:
                FAULTS[fault].spoil(trainer, scheduler)
        return start

    with mock.patch.object(sessions, "load", load_and_spoil):
        return session(rank, plan, argv, end_step)


def alone(leg: Leg, folder: Path, step: int) -> tuple[Session, Saved]:
    """One process makes the step after ``step`` from the checkpoint in ``folder``."""
    one = Leg(one_process_plan(leg.plan), step + 1, sharded=False)
    with tempfile.TemporaryDirectory() as there:
        argv = one.argv(load=str(folder), ckpt_step=str(step), save=there)
        (seen,) = run_ranks(session, 1, one.plan, argv, step + 1)
        return seen, read_saved(Path(there), step + 1)


def assert_goes_on(leg: Leg, ranks: list[Session], folder: Path, *, loaded: Saved) -> None:
    """``ranks`` have loaded ``loaded``, made the steps of ``leg`` from there, and saved all to ``folder``."""
    before = read_saved(folder, loaded.state.step)
    assert_same_state(before, loaded)
    assert_ranks_hold(leg.plan, [each.first_weights for each in ranks], before)
    for i in range(leg.end_step - loaded.state.step):
        assert_step(leg, [each.results[i] for each in ranks], folder, before=before)
        before = read_saved(folder, before.state.step + 1)
    assert_ranks_hold(leg.plan, [each.weights for each in ranks], before)


def assert_step(leg: Leg, results: list[StepResult], folder: Path, *, before: Saved) -> None:
    """The step after ``before`` is AdamW's, with the gradient that one process has there."""
    precision, adam = leg.plan.precision, adam_options(parse_args(leg.argv(save=str(folder))).optimizer)
    after = read_saved(folder, before.state.step + 1)
    seen, wanted = alone(leg, folder, before.state.step)
    (expected,) = seen.results
    for result in results:
        assert (result.skipped, result.loss_scale) == (expected.skipped, expected.loss_scale)
        assert result.loss == pytest.approx(expected.loss, rel=LOSS_BOUND[precision]), "loss is not one process's"
    assert after.state.loss_scaler == wanted.state.loss_scaler
    updates = before.state.adam_step
    if expected.skipped:
        assert after.state.adam_step == updates
        assert_same_tensors(after, before)
        return
    assert_weights_are_rounded_masters(after)
    assert_adamw_step(before, after, adam, lr=LR * (1 - updates / END), num_updates=updates + 1)
    distance = gradient_distance(before, after, wanted, beta1=adam.betas[0])
    bound = GRADIENT_BOUND[precision] if leg.plan.model.num_experts is None else EXPERTS_BOUND
    assert distance <= bound, f"gradient is not one process's: {distance:.1e} of it apart"


def assert_ranks_hold(made: Plan, weights: list[dict[str, np.ndarray]], saved: Saved) -> None:
    """Every rank's modules have the saved weights, bit for bit, also what another rank owns."""
    by_name = {parameter.name: parameter for parameter in saved.parameters}
    for rank, held in enumerate(weights):
        for name, values in held.items():
            whole = saved.tensors[f"weights/{name}"].double().numpy()
            expected = shard(whole, by_name[name], trace_of(made, rank))
            np.testing.assert_array_equal(values, expected, f"rank {rank} has other weights {name} than were saved")


def in_precision(made: Plan, precision: Precision) -> Plan:
    return dataclasses.replace(made, precision=precision)


TWO_LAYERS = gpt2_model(num_layers=2)
FIRST = plan(
    TWO_LAYERS,
    [
        replica(stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True), stage(layers=(1, 2), ranks=(2,)), num_samples=4),
        replica(stage(layers=(0, 2), ranks=(3,)), num_samples=4),
    ],
)
SECOND = plan(
    TWO_LAYERS,
    [
        replica(
            dataclasses.replace(stage(layers=(0, 0.5), ranks=(3,)), optimizer_share=3),
            stage(layers=(0.5, 2), ranks=(0, 2), dp=2),
            num_samples=8,
        )
    ],
    idle_ranks=(1,),
)


def assert_there_and_back(first: Leg, second: Leg, folder: Path) -> list[Session]:
    """``first``, ``second`` and ``first`` again, each from the end of the one before."""
    a, b, c = folder / "a", folder / "b", folder / "c"
    started = first.run(a)
    at_half = read_saved(a, first.end_step)
    assert at_half.state.adam_step == sum(not result.skipped for result in started[0].results)
    there = second.run(b, load=a)
    assert_goes_on(second, there, b, loaded=at_half)
    last = dataclasses.replace(first, end_step=END)
    back = last.run(c, load=b)
    assert_goes_on(last, back, c, loaded=read_saved(b, second.end_step))
    return [started[0], there[0], back[0]]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.rotates(every=2, turn=0)), "fp16"])
def test_half_precision_goes_on_under_another_plan(precision: Precision, tmp_path: Path) -> None:
    """Tied embeddings cut by tp, half layers, unequal shares, an idle rank; in fp16 an overflow under each plan."""
    a, b = in_precision(FIRST, precision), in_precision(SECOND, precision)
    first, second = Leg(a, HALF, first_scale=OVERFLOWING), Leg(b, HALF + 1, first_scale=OVERFLOWING)
    seen = assert_there_and_back(first, second, tmp_path)
    results = [result for each in seen for result in each.results]
    overflows = [True, False, False, True] if precision == "fp16" else [False] * END
    assert [result.skipped for result in results] == overflows


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Leg, Leg]:
    """Two legs of one training, under any two plans of one small model, each with any optimizer."""
    of = st.just(draw(models().filter(lambda model: 2 <= model.num_layers <= 3)))
    several = trainable_plans(max_ranks=5, of=of).filter(
        lambda drawn: drawn.world_size > 1 and drawn.global_batch_size <= 24
    )
    drawn = [draw(several.filter(is_legal)) for _ in range(2)]
    batch = max(each.global_batch_size for each in drawn)
    precision = draw(st.sampled_from(["bf16", "fp16"]))
    first, second = (
        Leg(
            in_precision(with_batch(each, batch), precision),
            end_step,
            sharded=draw(st.sampled_from([True, True, False])),
            overlap=draw(st.booleans()),
        )
        for each, end_step in zip(drawn, (HALF, HALF + 1), strict=True)
    )
    return first, second


@pytest.mark.slow
@pytest.mark.rotates(every=6, turn=1)
@given(pairs())
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a case takes seconds, and is small already
    suppress_health_check=list(HealthCheck),
)
def test_half_precision_goes_on_under_random_plans(pair: tuple[Leg, Leg]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_there_and_back(*pair, Path(folder))


@dataclass(frozen=True)
class Fault:
    """What could go wrong at a resume, and what notices it."""

    spoil: Callable[[Trainer, OptimizerParamScheduler], None]
    noticed: str
    precision: Precision = "bf16"


def first_main(trainer: Trainer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the optimizer of this rank updates first, and its moments."""
    main = trainer.torch_optimizer.param_groups[0]["params"][0]
    return main.detach(), trainer.torch_optimizer.state[main]


def exchange_moments(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    _, state = first_main(trainer)
    mean = state["exp_avg"].clone()
    state["exp_avg"].copy_(state["exp_avg_sq"])
    state["exp_avg_sq"].copy_(mean)


def shift_a_moment(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    _, state = first_main(trainer)
    state["exp_avg_sq"].copy_(state["exp_avg_sq"].roll(1))


def lose_the_last_bits(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    """The master copy is made of the rounded weights."""
    main, _ = first_main(trainer)
    main.copy_(main.bfloat16())


def keep_a_stale_weight(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    """One element of a parameter of this rank is not what its owner has."""
    *_, (_, tensor) = trainer.parameters.values()
    tensor.data.view(-1)[-1:].mul_(1 + 2**-7)


def lose_an_update(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    """Bias correction counts one update too few."""
    for state in trainer.torch_optimizer.state.values():
        state["step"] -= 1


def restart_the_learning_rate(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    for group in trainer.torch_optimizer.param_groups:
        group["lr"] = LR


def restart_the_schedule(_: Trainer, scheduler: OptimizerParamScheduler) -> None:
    scheduler.num_steps = 0


def lose_the_loss_scale(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    assert trainer.scaler is not None
    trainer.scaler.scale = trainer.scaler.options.initial


def lose_the_clean_steps(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    """Since the loss scale last moved."""
    assert trainer.scaler is not None
    trainer.scaler.clean_steps = 0


def train_on_the_batch_before(*_: Any) -> None:
    now = training.microbatches
    training.microbatches = lambda plan, rank, *, step, first_sample: now(plan, rank, step=step - 1)


def leave_weights_unrounded(*_: Any) -> None:
    """The update reaches the master copy alone."""
    optimizer._UpdatedRange.set_weights = lambda segment: None  # type: ignore[method-assign]


def gather_nothing(trainer: Trainer, _: OptimizerParamScheduler) -> None:
    """What the other owners have updated does not arrive."""
    gather = trainer._gather
    start = gather.start

    def start_and_undo() -> None:
        before = [local.weights.clone() for _, local in gather._queue]
        start()
        gather.finish()
        for (_, local), old in zip(gather._queue, before, strict=True):
            old[local.owned] = local.weights[local.owned]
            local.weights.copy_(old)

    gather.start = start_and_undo  # type: ignore[method-assign]


NOT_SAVED = "is not what was saved"
FAULTS = {
    "exchanged moments": Fault(exchange_moments, NOT_SAVED),
    "a shifted moment": Fault(shift_a_moment, NOT_SAVED),
    "a master copy of rounded weights": Fault(lose_the_last_bits, NOT_SAVED),
    "a stale weight": Fault(keep_a_stale_weight, f"{NOT_SAVED}|has other weights"),
    "an update too few": Fault(lose_an_update, "main weight .* is not AdamW's"),
    "the first learning rate": Fault(restart_the_learning_rate, "main weight .* is not AdamW's"),
    "a schedule from the start": Fault(restart_the_schedule, r"scheduled_samples is 0, \d+ was saved"),
    "the first loss scale": Fault(lose_the_loss_scale, r"scale=1572864\.0.* was saved", precision="fp16"),
    "clean steps forgotten": Fault(lose_the_clean_steps, "growth_tracker=0.* was saved", precision="fp16"),
    "the batch before": Fault(train_on_the_batch_before, "loss is not one process's"),
    "weights that stay": Fault(leave_weights_unrounded, "is not its master copy, rounded"),
    "a gather that brings nothing": Fault(gather_nothing, "has other weights"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Precision], Path]:
    """The checkpoint of the first leg, in any precision."""

    @functools.cache
    def folder(precision: Precision) -> Path:
        path = tmp_path_factory.mktemp(precision)
        Leg(in_precision(FIRST, precision), HALF, first_scale=OVERFLOWING).run(path)
        return path

    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rotates(fault.noticed, every=2)) for name, fault in FAULTS.items()]
)
def test_a_fault_is_noticed(name: str, trained: Callable[[Precision], Path], tmp_path: Path) -> None:
    fault = FAULTS[name]
    source = trained(fault.precision)
    leg = Leg(in_precision(SECOND, fault.precision), HALF + 1, first_scale=OVERFLOWING)
    ranks = leg.run(tmp_path, load=source, fault=name)
    with pytest.raises(AssertionError, match=fault.noticed):
        assert_goes_on(leg, ranks, tmp_path, loaded=read_saved(source, HALF))
