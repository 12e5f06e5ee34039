"""A stretch of training that loads and saves as its flags say, without data files and without a launcher."""

from dataclasses import dataclass, field

import numpy as np
import torch

from hetero.checkpoint.state import RunSettings
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.optimizer import StepResult
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from megatron.pretrain.checkpointing import load, saving, step_of_start
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import build_trainer
from tests.helpers.poisoned_memory import assert_filled, built
from tests.helpers.shared_memory_group import with_shared_memory
from tests.helpers.training import data_of


@dataclass
class Session:
    """What a rank saw: where it began and with which weights, every step from there, the learning rate of the next
    step, and at the end its weights and state, by canonical name and offset."""

    start_step: int
    first_weights: dict[str, np.ndarray] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    next_lr: float = 0.0
    loss_scale: float = 1.0
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]


def session(rank: int, plan: Plan, argv: list[str], end_step: int) -> Session:
    """Run on every rank of ``plan``: steps up to ``end_step``.

    Where ``argv`` has ``--save``, what was loaded is saved again before the first step, and the end.
    """
    config = parse_args(argv)
    context = with_shared_memory(create_groups(plan, device=torch.device("cpu")))
    step = step_of_start(config.checkpoint)
    trainer = built(lambda: build_trainer(config, context, draws_weights=step is None), draws_weights=step is None)
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    start = load(config, context, trainer, scheduler, step=step, settings=RunSettings())
    assert_filled(trainer)
    start_step = start.step
    training = TrainingSession(
        context,
        trainer,
        data=data_of(context, first_step=start_step, varying_batch=config.parallel.varying_batch),
        schedule=scheduler,
        check_for_nan=config.run.check_for_nan,
        start_step=start_step,
        varying_batch=config.parallel.varying_batch,
    )
    seen = Session(start_step, first_weights=weights_of(training))
    with saving(config, context, trainer, scheduler, start=start) as saver:
        if start_step > 0:
            saver.after(start_step, last=True)
        for step in range(start_step + 1, end_step + 1):
            seen.results.append(training.step())
            saver.after(step, last=step == end_step)
    seen.next_lr = training.learning_rate
    seen.loss_scale = trainer.scaler.scale if trainer.scaler is not None else 1.0
    seen.weights = weights_of(training)
    seen.state = state_of(trainer)
    return seen


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """What this rank updates, by canonical name and offset."""
    return {
        f"{each.name} from {each.offsets}": each.tensor.detach().double().numpy().copy()
        for each in trainer.optimizer.state(owner=None)
    }


def weights_of(training: TrainingSession) -> dict[str, np.ndarray]:
    """This rank's shards by canonical name."""
    return {name: tensor.double().numpy().copy() for name, tensor in training.weights().items()}
