"""Runs the steps of a training run on one rank, one after the other.

Everybody who trains calls this one loop body: the harness, the tools, the emulation and the tests. It knows neither
checkpoints nor logs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.rank_consensus import ConsensusError
from hetero.plan.batch_shares import with_batch_size
from hetero.plan.batch_sizes import BatchSizes, VaryingBatch
from hetero.runtime.microbatch import DataPrefetcher, Microbatch
from hetero.runtime.optimizer import StepResult
from hetero.runtime.trainer import Trainer
from hetero.runtime.update_groups import UpdateGroup
from hetero.text import numbered


class ParamScheduler(Protocol):
    """Sets the learning rate and the weight decay of the next update, as megatron-core's scheduler does."""

    def step(self, increment: int) -> None:
        """Move on by the samples of an update."""


class NotFiniteError(ConsensusError):
    """A loss or a gradient is infinite or not a number; every rank raises it after the same step."""


def _never() -> bool:
    return False


class TrainingSession:
    """Runs step after step with the trainer, data and learning-rate schedule of one rank.

    An idle rank takes part in the decisions. Data are read one step ahead.

    Args:
        data: this rank's microbatches, in order, of one step after the other; ``None`` where
            :func:`hetero.runtime.trainer.reads_data` is false.
        schedule: moves on with every update, so not in a step that was skipped; ``None`` keeps the learning rate.
        check_for_nan: raise where a loss or a gradient is not finite, as Megatron-LM's
            ``--check-for-nan-in-loss-and-grad`` does. A loss scale that adapts finds its way by such steps: they are
            skipped, whatever this says.
        start_step: how many steps were done before.
        varying_batch: changes the batch of a step, at most to that of the plan; ``data`` changes likewise.

    Attributes:
        steps_done: since the run began, skipped ones too.
        batches: how many samples each step takes.
    """

    def __init__(
        self,
        context: ParallelContext,
        trainer: Trainer,
        *,
        data: Iterator[Sequence[Microbatch]] | None,
        schedule: ParamScheduler | None = None,
        check_for_nan: bool = True,
        start_step: int = 0,
        varying_batch: VaryingBatch | None = None,
    ) -> None:
        self.trainer = trainer
        self.steps_done = start_step
        self.batches = BatchSizes(context.plan.global_batch_size, varying_batch)
        self._batch_size = context.plan.global_batch_size
        self._context = context
        self._data = (
            DataPrefetcher(data, context.device, most_microbatches=_most_microbatches(context, self.batches))
            if data is not None
            else None
        )
        self._schedule = schedule
        adapts_scale = trainer.scaler is not None and trainer.scaler.options.constant is None
        self._check_for_nan = check_for_nan and not adapts_scale

    @property
    def learning_rate(self) -> float:
        """That of the next step."""
        lr: float = self.trainer.torch_optimizer.param_groups[0]["lr"]
        return lr

    @property
    def decoupled_learning_rate(self) -> float | None:
        """That of embedding and output layer, ``None`` where they share the others'."""
        groups = self.trainer.torch_optimizer.param_groups
        return groups[UpdateGroup.DECOUPLED]["lr"] if len(groups) > UpdateGroup.DECOUPLED else None

    def step(self, *, wants_stop: Callable[[], bool] = _never) -> StepResult:
        """The next step; collective over the world.

        Its result says ``stop`` on all ranks where one of them has been told to end, or could not read the data of the
        step after this one: :meth:`read_ahead` then says why.

        Args:
            wants_stop: whether this rank has been told to end, asked when its gradients are there.

        Raises:
            NotFiniteError: a loss or a gradient is not finite; on every rank, and before anybody can save.
        """
        self.compute_gradients()
        return self.update(wants_stop=wants_stop())

    def read_ahead(self) -> None:
        """Read the next step's data, if this rank reads any and has not done so.

        Raises:
            HeteroError: they cannot be read.
        """
        if self._data is not None:
            self._data.fetch()
            if self._data.error is not None:
                raise self._data.error

    def compute_gradients(self) -> None:
        """The first half of :meth:`step`, after which the gradients can be looked at."""
        size = self.batches.size(self.steps_done)
        if size != self._batch_size:
            self.trainer.change_batch(with_batch_size(self._context.plan, size))
            self._batch_size = size
        self.trainer.compute_gradients(self._data.take() if self._data is not None else None)

    def update(self, *, wants_stop: bool = False) -> StepResult:
        """The second half of :meth:`step`; before it waits for the device, the next step's data are on their way."""
        if self._data is not None:
            self._data.fetch()
            wants_stop |= self._data.error is not None
        result = self.trainer.update(wants_stop=wants_stop)
        self.steps_done += 1
        if self._check_for_nan and not result.is_finite:
            self._raise_not_finite()
        if self._schedule is not None and not result.skipped:
            self._schedule.step(increment=self._batch_size)
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's shards by canonical name, as the last update left them."""
        return self.trainer.weights()

    def _raise_not_finite(self) -> None:
        """Name the ranks; all-gather over the world.

        Gradients have been summed by then: all ranks that share one have the same to show.
        """
        # The ranks say so in a communicator in which weights may still be gathered.
        self.trainer.finish_gather()
        found = self.trainer.not_finite()
        every = [found] * self._context.plan.world_size
        dist.all_gather_object(every, found)
        ranks_of = {what: [rank for rank, each in enumerate(every) if what in each] for what in ("loss", "gradient")}
        where = [f"the {what} on {numbered('rank', ranks)}" for what, ranks in ranks_of.items() if ranks]
        verb = "are" if len(where) > 1 else "is"
        raise NotFiniteError(
            f"step {self.steps_done}: {' and '.join(where) or 'the gradient norm'} {verb} not finite, and training "
            "stopped before it could be saved; go on from the last checkpoint with a lower --lr, a lower --clip-grad, "
            "other data, or skip such steps with --no-check-for-nan-in-loss-and-grad"
        )


def _most_microbatches(context: ParallelContext, batches: BatchSizes) -> int:
    """Return the number of microbatches of this rank's largest step. That need not be the step of the largest batch, as
    replicas divide each size by largest remainders."""
    assert context.work is not None, "an idle rank reads no data"
    place, plan = context.work.placement, context.plan
    plans = [plan, *(with_batch_size(plan, size) for size in batches.smaller)]
    return max(each.replicas[place.replica].num_microbatches(place.stage) for each in plans)
