"""One rank's part in a training step, from its microbatches to its updated weights."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime.batch import Microbatch
from hetero.runtime.grad_sync import GradientSync, NamedParameters
from hetero.runtime.optimizer import AdamOptions, Optimizer, StepResult
from hetero.runtime.options import StageOptions
from hetero.runtime.pipeline import PipelineExecutor
from hetero.runtime.stage import build_stage


class Trainer:
    """Stage, gradient sums and optimizer of a rank. An idle rank has none of them and joins the decisions.

    Args:
        bucket_numel: elements of gradient that are reduced by one collective, about.
        overlap: reduce gradients beside the last backward instead of after it.

    Raises:
        ConfigError: this device cannot run the layers that ``options`` asks for.
    """

    def __init__(
        self,
        context: ParallelContext,
        *,
        options: StageOptions,
        adam: AdamOptions,
        seed: int,
        bucket_numel: int,
        overlap: bool = True,
    ) -> None:
        self._context = context
        self._executor: PipelineExecutor | None = None
        self._gradients: GradientSync | None = None
        self.parameters: NamedParameters = {}
        if (work := context.work) is not None:
            model = build_stage(context, work, options=options, seed=seed)
            self.parameters = model.parameters
            self._gradients = GradientSync(context, work, model.parameters, bucket_numel=bucket_numel, overlap=overlap)
            self._executor = PipelineExecutor(context, work, model)
        self._optimizer = Optimizer(context, self.parameters, self._gradients, adam)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=context.device)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose parameter groups a scheduler sets."""
        return self._optimizer.torch_optimizer

    def step(self, microbatches: Sequence[Microbatch] | None) -> StepResult:
        """One step on the global batch; collective over the world.

        Args:
            microbatches: this rank's, in order; ``None`` where :func:`reads_data` is false.
        """
        self.compute_gradients(microbatches)
        return self.update()

    def compute_gradients(self, microbatches: Sequence[Microbatch] | None) -> None:
        """The gradient of the mean token loss of the global batch, summed over all holders, in every ``.grad``."""
        work = self._context.work
        if work is None or self._executor is None or self._gradients is None:
            return
        self._gradients.zero()
        # Tensor-parallel ranks of the last stage all have the whole loss; one of them reports it.
        reports = work.is_last and work.placement.tp_rank == 0
        self._num_tokens = _count_tokens(microbatches) if reports else torch.zeros_like(self._num_tokens)
        loss = self._executor.run(
            microbatches,
            loss_scale=self._start_loss_scale() if work.is_last else None,
            before_last_backward=self._gradients.expect_last_backward,
        )
        self._gradients.finish()
        self._loss_sum = loss if reports else torch.zeros_like(loss)

    def update(self) -> StepResult:
        """Clip, and step the optimizer, or skip on all ranks; collective over the world."""
        return self._optimizer.step(loss_sum=self._loss_sum, num_tokens=self._num_tokens)

    def _start_loss_scale(self) -> Callable[[], torch.Tensor]:
        """1 / (loss tokens of the global batch), which nobody needs before the first backward.

        All-reduce (sum) over the last stages of all replicas, beside the first forward.
        """
        total = self._num_tokens.clone()
        pending = dist.all_reduce(total, group=self._context.losses, async_op=True)

        @cache
        def loss_scale() -> torch.Tensor:
            pending.wait()
            return 1.0 / total.clamp(min=1)

        return loss_scale


def _count_tokens(microbatches: Sequence[Microbatch] | None) -> torch.Tensor:
    assert microbatches is not None, "a last stage reads labels"
    return torch.stack([batch.loss_mask_BS.sum() for batch in microbatches]).sum(dtype=torch.float64)


def reads_data(context: ParallelContext) -> bool:
    """Whether this rank needs microbatches: first stages for their tokens, last stages for their labels."""
    return context.work is not None and (context.work.is_first or context.work.is_last)
