"""Runs the loop over the steps of a run, and does what is due after each: saves, evaluations, reports, the end."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.distributed.failure_detector import FailureDetector
from hetero.distributed.process_exit import freeze_objects
from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.rank_consensus import ConsensusError, is_true_on_any_rank, on_all_ranks
from hetero.runtime.session import TrainingSession
from megatron.pretrain.checkpointing import Saver
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.elastic import ElasticRank
from megatron.pretrain.evaluation import Evaluation
from megatron.pretrain.metrics import Metrics
from megatron.pretrain.profiler import StepProfiler, profiling
from megatron.pretrain.rank_figures import RankFigures
from megatron.pretrain.stopping import Stop


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """How a run ends after a step; the same on all ranks.

    is_asked: by a signal, a time limit, or because the next step has no data; nothing is evaluated then.
    is_for_good: the run does not go on in another epoch of elastic training.
    error: what is wrong with the data of the next step.
    """

    is_asked: bool
    is_for_good: bool
    error: ConsensusError | None = None


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Runs the loop over the steps, with saves, evaluations and reports between them."""

    config: PretrainConfig
    context: ParallelContext
    session: TrainingSession
    evaluations: Sequence[Evaluation]
    saver: Saver
    stop: Stop
    metrics: Metrics | None
    figures: RankFigures
    detector: FailureDetector
    elastic: ElasticRank

    def train(self) -> None:
        """Run the steps that are left; collective over the world."""
        num_steps, start_step = self.config.run.train_iters, self.session.steps_done
        if start_step >= num_steps:
            self._say(f"step {start_step} is done and --train-iters is {num_steps}: nothing left to train")
        self.detector.doing = "reading the first samples"
        error = self._data_error()
        # What exists by now stays: looking through it for garbage again and again took a third of small steps.
        freeze_objects()
        with profiling(
            self.config, rank=self.context.rank, device=self.context.device, start_step=start_step
        ) as profiler:
            if self.elastic.goes_on_from_copies:
                # A rank may have been lost, or a save may have failed, before this was done.
                end = self._end_where_copies_go_on(start_step, error)
                self._finish_step(start_step, end)
            else:
                end = None
                if error is not None:
                    raise error
            if end is None:
                self._steps(start_step, num_steps, profiler)
        if self.metrics is not None:
            self.metrics.say_where_time_went()

    def _end_where_copies_go_on(self, step: int, error: ConsensusError | None) -> _End | None:
        """Return how the run ends after the step that copies have brought back, ``None`` if it goes on."""
        # A job that begins from an object store goes on after a step of --exit-interval, as one with --load does.
        is_last = step >= self.config.run.train_iters if self.elastic.begins_a_job else self.stop.is_last(step)
        return _End(is_asked=error is not None, is_for_good=True, error=error) if is_last or error is not None else None

    def _steps(self, start_step: int, num_steps: int, profiler: StepProfiler) -> None:
        for step in range(start_step + 1, num_steps + 1):
            self.detector.doing = f"training step {step}"
            rates = self.session.learning_rate, self.session.decoupled_learning_rate
            num_samples = self.session.batches.size(step - 1)
            self.figures.before_step(step)
            result = self.session.step(wants_stop=lambda: self.stop.wanted)
            profiler.after_step(step)
            if self.metrics is not None:
                self.metrics.record(step, result, rates=rates, num_samples=num_samples)
            with self._outside_steps("reporting"):
                self.figures.after_step(step, num_samples=num_samples)
            end = self._end_after(step, is_asked=result.stop)
            goes_on_elsewhere = end is not None and not end.is_for_good
            self.elastic.after_step(step, is_last=end is not None, goes_on_elsewhere=goes_on_elsewhere)
            self._finish_step(step, end)
            if end is not None:
                return

    def _end_after(self, step: int, *, is_asked: bool) -> _End | None:
        """Return how the run ends after ``step``, ``None`` if it goes on; collective over the world where it ends."""
        is_last = self.stop.is_last(step)
        if not is_asked:
            return _End(is_asked=False, is_for_good=True) if is_last else None
        # What all ranks do after the last step may be in a communicator in which weights are still gathered.
        self.session.trainer.finish_gather()
        error = self._data_error()
        is_for_good = not self.elastic.is_on or self._is_stopped_for_good()
        return _End(is_asked=True, is_for_good=is_for_good or is_last or error is not None, error=error)

    def _is_stopped_for_good(self) -> bool:
        """Whether all nodes leave, and the run can be saved: without --save, copies alone have its state."""
        is_for_good = is_true_on_any_rank(self.stop.is_for_good)
        return is_for_good and self.config.checkpoint.save is not None

    def _finish_step(self, step: int, end: _End | None) -> None:
        """Do what is due after a step that is trained, or that copies have brought back; collective over the world.

        Raises:
            ConsensusError: the next step has no data; the step is saved.
            CheckpointError: it cannot be saved.
        """
        if end is not None:
            self.session.trainer.finish_gather()
            # Before a save, which may take long: who is lost meanwhile loses nothing.
            self.elastic.commit_copies()
        with self._outside_steps("saving"):
            self.detector.doing = f"saving step {step}"
            self.saver.after(step, last=end is not None and end.is_for_good)
        # Who sent a signal does not wait for long.
        if end is None or not end.is_asked:
            with self._outside_steps("evaluating"):
                self._evaluate(step, last=end is not None)
        if end is None:
            return
        if end.error is not None:
            raise end.error
        if step < self.config.run.train_iters:
            self._say(f"stopped after step {step} of {self.config.run.train_iters}")

    def _data_error(self) -> ConsensusError | None:
        """Return what is wrong with the next step's data on some rank, if anything; collective over the world."""
        try:
            on_all_ranks(self.session.read_ahead)
        except ConsensusError as error:
            return error
        return None

    def _outside_steps(self, doing: str) -> contextlib.AbstractContextManager[None]:
        return self.metrics.outside_steps(doing) if self.metrics is not None else contextlib.nullcontext()

    def _evaluate(self, step: int, *, last: bool) -> None:
        run = self.config.run
        is_due = step % run.eval_interval == 0 and step >= run.start_eval_at_iter
        for evaluation in self.evaluations:
            if last or (evaluation.split == "valid" and is_due):
                self.detector.doing = f"evaluating after step {step}"
                loss = evaluation.loss(self.context, self.session.trainer)
                if self.metrics is not None:
                    self.metrics.record_evaluation(step, evaluation.split, loss)

    def _say(self, message: str) -> None:
        if self.context.rank == 0:
            print(message, flush=True)
