"""Saves and loads a training run with :mod:`hetero.checkpoint`, as ``--save`` and ``--load`` ask for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.checkpoint.folder import find_checkpoint, read_state
from hetero.checkpoint.reader import LoadedCheckpoint, load_checkpoint
from hetero.checkpoint.state import CheckpointState, LossScalerState, RunSettings
from hetero.checkpoint.writer import CheckpointWriter
from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.rank_consensus import ConsensusError, from_rank_0, on_all_ranks
from hetero.errors import ConfigError
from hetero.plan.batch_sizes import BatchSizes, by_flag
from hetero.plan.ir import Plan
from hetero.runtime.auxiliary_loss import changed_microbatch_note
from hetero.runtime.mcore import dropout_state, restore_dropout_state
from hetero.runtime.trainer import Trainer
from hetero.spec.hugging_face.generation import GenerationConfig
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.training_config import CheckpointConfig
from megatron.pretrain.given_files import step_to_load
from megatron.pretrain.resume_notes import resume_notes


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a run starts, and what each of its checkpoints says of it.

    step: steps that are done.
    generation_config: how text is generated from the model, as the checkpoint says that it starts from.
    settings: of this run.
    """

    step: int = 0
    generation_config: GenerationConfig = field(default_factory=dict)
    settings: RunSettings = field(default_factory=RunSettings)


def load(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
    *,
    step: int | None,
    settings: RunSettings,
) -> RunStart:
    """Continue where the checkpoint of ``step`` under ``--load`` ends, and return where that is.

    Says what is different from ``settings``, those of this run. Collective over the world.

    Args:
        step: as :func:`step_of_start` has found it.

    Raises:
        ConfigError: a damaged checkpoint, or one of another run; the same on all ranks.
    """
    wanted = config.checkpoint
    if step is None:
        if wanted.load is not None:
            _say(context, f"{wanted.load}: no checkpoint yet, training starts from --seed {config.run.seed}")
        return RunStart(settings=settings)
    loaded = on_all_ranks(lambda: _fill(config, context, trainer, step))
    for note in loaded.notes:
        _say(context, note)
    trainer.finish_loading(num_updates=0 if wanted.finetune else loaded.state.adam_step)
    if wanted.finetune:
        _say(context, f"loaded the weights of {loaded.path}; training starts at step 1")
        return RunStart(generation_config=loaded.state.generation_config or {}, settings=settings)
    restore_scalars(loaded.state, loaded.rank_state, context, trainer, scheduler)
    say_what_differs(config, context, loaded.state, settings)
    start = step if wanted.override_step is None else wanted.override_step
    taken = f", taken for step {start} (--override-ckpt-iteration)" if start != step else ""
    _say(context, f"loaded {loaded.path}{taken}; training goes on after step {start}")
    return RunStart(start, loaded.state.generation_config or {}, settings)


class Saver:
    """Saves a run into the folder of ``--save``; does nothing without that flag."""

    def __init__(
        self,
        config: PretrainConfig,
        context: ParallelContext,
        trainer: Trainer,
        scheduler: OptimizerParamScheduler,
        writer: CheckpointWriter | None,
        start: RunStart,
        *,
        goes_on_from_copies: bool = False,
    ) -> None:
        self._config = config
        self._context = context
        self._trainer = trainer
        self._scheduler = scheduler
        self._writer = writer
        self._start = start
        self._goes_on_from_copies = goes_on_from_copies

    def after(self, step: int, *, last: bool) -> None:
        """Save after ``step`` if it is due, or the last; collective over the world.

        Raises:
            CheckpointError: it cannot be saved, or an earlier save in the background could not.
        """
        writer = self._writer
        if writer is None:
            return
        if not (last or self._is_due(writer, step)):
            return
        self._trainer.finish_gather()
        with self._context.timing.outside_steps():
            writer.save(
                step=step,
                slices=self._trainer.optimizer.state(owner=self._context.rank),
                state=self._state(step),
                rank_state=dropout_state() if self._context.work is not None else None,
            )

    def _is_due(self, writer: CheckpointWriter, step: int) -> bool:
        """Whether ``--save-interval`` asks for a checkpoint now; collective over the world for a restored step."""
        interval = self._config.checkpoint.save_interval
        if interval is None:
            return False
        if not (self._goes_on_from_copies and step == self._start.step):
            return step % interval == 0
        # A save in the background may have been lost with steps after it that were copied.
        due_step = step - step % interval
        return due_step > 0 and not writer.has_saved(range(due_step, step + 1))

    def _state(self, step: int) -> CheckpointState:
        return run_state(self._config, self._context, self._trainer, self._scheduler, step=step, start=self._start)


def run_state(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
    *,
    step: int,
    start: RunStart,
) -> CheckpointState:
    """The scalars of a run after ``step``."""
    plan, scaler = context.plan, trainer.scaler
    batches = BatchSizes(plan.global_batch_size, config.parallel.varying_batch)
    return CheckpointState(
        step=step,
        model=plan.model,
        precision=plan.precision,
        plan=plan,
        consumed_samples=batches.first_sample(step),
        adam_step=trainer.optimizer.num_updates,
        scheduled_samples=scheduler.num_steps,
        rampup=batches.varying_batch,
        train_samples=batches.first_sample(config.run.train_iters),
        seed=config.run.seed,
        loss_scaler=None
        if scaler is None
        else LossScalerState(scale=scaler.scale, growth_tracker=scaler.clean_steps, hysteresis=scaler.overflows_left),
        generation_config=dict(start.generation_config) or None,
        settings=start.settings,
    )


@contextmanager
def saving(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
    *,
    start: RunStart,
    goes_on_from_copies: bool = False,
    was_here_before: bool = False,
) -> Iterator[Saver]:
    """Open the folder of ``--save``, and publish the last save when the block ends, be it with an error of all ranks.

    Collective over the world at both ends.

    Args:
        goes_on_from_copies: what was due after the step of ``start`` may not have been done.
        was_here_before: later checkpoints in the folder may be this run's own, which has lost their steps since.

    Raises:
        CheckpointError: the folder cannot be written.
        ConfigError: it holds later checkpoints than ``start.step``, which are another run's.
    """
    wanted, writer = config.checkpoint, None
    if wanted.save is not None:
        writer = CheckpointWriter(
            wanted.save,
            world=context.world,
            start_step=start.step,
            keep_last=wanted.keep_last,
            asynchronous=wanted.asynchronous,
            own=run_state(config, context, trainer, scheduler, step=start.step, start=start)
            if was_here_before
            else None,
            say=lambda news: print(news, flush=True),
        )
    try:
        yield Saver(config, context, trainer, scheduler, writer, start, goes_on_from_copies=goes_on_from_copies)
    except ConsensusError:
        # What is being written in the background is from before, and where a later run goes on.
        if writer is not None:
            writer.wait()
        raise
    if writer is not None:
        writer.wait()


def step_of_start(wanted: CheckpointConfig) -> int | None:
    """Find the step whose checkpoint the run loads, ``None`` if it starts from initial weights.

    A run that saves and loads in one folder starts from nothing where the folder has no checkpoint yet, so that one
    command line serves its first launch and every later one.

    Collective over the world: rank 0 chooses for all, as a file system may show hosts a new checkpoint at different
    times.

    Raises:
        ConfigError: there is no checkpoint; the same on all ranks.
    """
    folder = wanted.load
    if folder is None:
        return None

    def choose() -> str:
        found = step_to_load(folder, wanted.load_step, starts_anew=folder == wanted.save and not wanted.finetune)
        return "" if found is None else str(found)

    text = from_rank_0(choose)
    return int(text) if text else None


def _fill(config: PretrainConfig, context: ParallelContext, trainer: Trainer, step: int) -> LoadedCheckpoint:
    wanted = config.checkpoint
    assert wanted.load is not None
    path = find_checkpoint(wanted.load, step)
    if not wanted.finetune:
        check_same_run(
            str(path),
            read_state(path),
            config,
            context.plan,
            otherwise="--finetune to start a new run from its weights",
        )
    return load_checkpoint(
        wanted.load,
        step=step,
        slices=trainer.optimizer.state(owner=None),
        plan=context.plan,
        rank=context.rank,
        only_weights=wanted.finetune,
    )


def check_same_run(where: str, state: CheckpointState, config: PretrainConfig, plan: Plan, *, otherwise: str) -> None:
    """Check what decides which sample comes when, before anything large is read.

    Args:
        where: names what holds ``state``, for messages.
        otherwise: what else the user can do, if the flags are as they should be.

    Raises:
        ConfigError: ``state`` is of another run.
    """
    if state.plan is None:
        raise ConfigError(f"{where}: holds weights of another program and no training state; add --finetune")
    given_flags = {
        "--seed": config.run.seed,
        "--seq-length": plan.seq_length,
        "--global-batch-size": plan.global_batch_size,
        **by_flag(config.parallel.varying_batch),
    }
    for flag, saved in state.samples_of_run().items():
        if saved == (given := given_flags[flag]):
            continue
        was = f"with {flag} {saved}" if saved is not None else f"without {flag}"
        fix = f"give {flag} {saved}" if saved is not None else "leave it out"
        now = f"with {given}" if given is not None else "without"
        raise ConfigError(f"{where}: saved {was}, not {now}: other samples would follow; {fix}, or {otherwise}")


def say_what_differs(
    config: PretrainConfig, context: ParallelContext, state: CheckpointState, settings: RunSettings
) -> None:
    """Say on rank 0 what is different in this run from the one that saved ``state``."""
    batches = BatchSizes(config.parallel.global_batch_size, config.parallel.varying_batch)
    notes = resume_notes(state, settings, train_samples=batches.first_sample(config.run.train_iters))
    if (changed_loss := changed_microbatch_note(config.stage, state.plan, context.plan)) is not None:
        notes.append(changed_loss)
    for note in notes:
        _say(context, f"note: {note}")


def restore_scalars(
    state: CheckpointState,
    rank_state: Mapping[str, torch.Tensor] | None,
    context: ParallelContext,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
) -> None:
    """Put schedule, loss scale and, if the plan is the same, dropout where they were."""
    scheduled = state.scheduled_samples
    scheduler.step(increment=state.adam_step * context.plan.global_batch_size if scheduled is None else scheduled)
    if trainer.scaler is not None and trainer.scaler.options.constant is None and state.loss_scaler is not None:
        trainer.scaler.scale = state.loss_scaler.scale
        trainer.scaler.clean_steps = state.loss_scaler.growth_tracker
        trainer.scaler.overflows_left = state.loss_scaler.hysteresis
    if rank_state and context.work is not None:
        restore_dropout_state(rank_state)


def _say(context: ParallelContext, message: str) -> None:
    if context.rank == 0:
        print(message, flush=True)
