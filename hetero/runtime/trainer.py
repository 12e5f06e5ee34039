"""Runs one rank's part of a training step, from its microbatches to its updated weights."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.timing import wait_for_all
from hetero.plan.ir import Plan
from hetero.plan.lowering import collective_options, evaluation_program, lower_rank
from hetero.runtime.buckets import LocalBucket, NamedParameters, connect_buckets, local_buckets
from hetero.runtime.dtypes import GRADIENT_DTYPES
from hetero.runtime.executor import Executor, StepInputs
from hetero.runtime.grad_sync import GradientSync
from hetero.runtime.host_activations import HostActivations
from hetero.runtime.host_gradients import HostGradients
from hetero.runtime.host_optimizer import HostOptimizer, update_cores
from hetero.runtime.host_weights import HostWeights
from hetero.runtime.layer_choice import runs_cuda
from hetero.runtime.loss_scaler import LossScaleOptions, LossScaler
from hetero.runtime.main_grad import main_grad
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions, Optimizer, StepResult
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.sharded_state import TensorSlice
from hetero.runtime.stage import build_stages
from hetero.runtime.stage_runner import StageRunner
from hetero.runtime.update_groups import updated_places
from hetero.runtime.warm_up import warm_up
from hetero.runtime.weight_gather import WeightGather
from hetero.schedule.actions import Action, ActionKind
from hetero.schedule.program import Program


class BackgroundCopies(Protocol):
    """Copies the state after a step while the next one runs, which does not change it before its update."""

    def votes(self) -> Sequence[float]:
        """What this rank has to say in the all-reduce of a step, as many numbers on every rank and in every step."""

    def decided(self, sums: Sequence[float]) -> None:
        """The sums of all ranks' votes, the same on every rank."""

    def wait_until_read(self) -> None:
        """Come back when the state may change: all of it has been read that was to be copied."""


class Trainer:
    """Holds the stages, gradient sums and optimizer of a rank, and trains them step by step.

    On an idle rank these are empty, and it joins the decisions. Collective over the world: to be made on all ranks.

    Args:
        loss_scale: used for a plan in fp16 only.
        warms_up: run every kernel once (:mod:`.warm_up`), which is collective over each stage's tensor-parallel group;
            ``None`` does so on CUDA.

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
        data_parallel: DataParallelOptions,
        loss_scale: LossScaleOptions | None = None,
        warms_up: bool | None = None,
    ) -> None:
        self._context = context
        plan = context.plan
        self.scaler = LossScaler.start(loss_scale or LossScaleOptions()) if plan.precision == "fp16" else None
        models = build_stages(context, options=options, seed=seed)
        self._modules = [model.module for model in models]
        self.parameters: NamedParameters = {name: each for model in models for name, each in model.parameters.items()}
        self._buckets = local_buckets(
            context,
            self.parameters,
            bucket_numel=plan.gradient_sync.bucket_numel or data_parallel.bucket_numel,
            gradient_dtype=GRADIENT_DTYPES[plan.precision],
        )
        connect_buckets(self._buckets)
        self._collectives = collective_options(
            plan,
            overlap_grad_reduce=data_parallel.overlap_grad_reduce,
            overlap_param_gather=data_parallel.overlap_param_gather,
        )
        self._program = program = self._program_of(plan)
        self._host = _host_optimizer(context, self._buckets, adam, data_parallel.host_cores)
        self.host_gradients = _host_gradients(context, self._buckets, self._host)
        self._sums = GradientSync(
            self._buckets, program, host=self._host, on_host=self.host_gradients, timing=context.timing
        )
        self._gather = WeightGather(self._buckets, program, self._modules, host=self._host, timing=context.timing)
        stages = {work.placement.stage: (work, model) for work, model in zip(context.stages, models, strict=True)}
        self.host_activations = HostActivations(
            {s: (work.stage, model.module) for s, (work, model) in stages.items()},
            program,
            num_layers=plan.model.num_layers,
            device=context.device,
            timing=context.timing,
        )
        self.host_weights = HostWeights(
            {s: (work.stage, model.module) for s, (work, model) in stages.items()},
            self._buckets,
            model=plan.model,
            device=context.device,
            whole=self._gather.whole,
            timing=context.timing,
        )
        self._runners = {
            s: StageRunner(
                context,
                work,
                model,
                activations=self.host_activations,
                weights=self.host_weights,
                ready=self._sums.arrived,
            )
            for s, (work, model) in stages.items()
        }
        self._executor = self._executor_of(program, plan)
        self.change_evaluation_batch(plan)
        self.optimizer = Optimizer(context, self._buckets, adam, scaler=self.scaler, host=self._host)
        self._background: BackgroundCopies | None = None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
        self._num_tokens = torch.zeros((), dtype=torch.float64, device=context.device)
        if runs_cuda(context.device) if warms_up is None else warms_up:
            warm_up(
                context,
                list(self._runners.values()),
                sums=self._sums,
                gather=self._gather,
                loss_scale=self._loss_scale_of,
                forwards_again=any(step.action.kind == ActionKind.R for step in program.queues["compute"]),
            )
            self.host_activations.reserve()

    def change_batch(self, plan: Plan) -> None:
        """Train from the next step on by ``plan``: that of the context, or what it is for a batch of another size.

        Weights, optimizer and evaluations stay. So do the gathers of weights: they are awaited in front of the first
        forward of a stage, which is there however many follow.

        Args:
            plan: made by :func:`hetero.plan.batch_shares.with_batch_size`.
        """
        self._program = program = self._program_of(plan)
        self._sums.follow(program)
        self.host_activations.follow(program)
        self._executor = self._executor_of(program, plan)

    def change_evaluation_batch(self, plan: Plan) -> None:
        """Evaluate by ``plan`` from now on; argument as that of :meth:`change_batch`."""
        self._evaluation = evaluation_program(plan, self._context.rank)
        self._evaluator = self._executor_of(self._evaluation, plan)

    def _program_of(self, plan: Plan) -> Program:
        buckets = {local.number: local.bucket for local in self._buckets}
        return lower_rank(plan, self._context.rank, buckets, options=self._collectives)

    def _executor_of(self, program: Program, plan: Plan) -> Executor:
        return Executor(
            self._context,
            program,
            stages=self._runners,
            sums=self._sums,
            gather=self._gather,
            activations=self.host_activations,
            global_batch_size=plan.global_batch_size,
        )

    def attach(self, background: BackgroundCopies) -> None:
        """Let ``background`` copy the state beside the steps that follow."""
        self._background = background
        if self._host is not None:
            self._host.before_weights_change(background.wait_until_read)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose parameter groups a scheduler sets."""
        return self.optimizer.torch_optimizer

    def static_bytes(self) -> tuple[int, int, int]:
        """Bytes of weights, gradients and optimizer state on this rank, whose sum no schedule changes."""
        weights = sum(local.weights.nbytes for local in self._buckets if not local.weights_on_host)
        gradients = sum(local.gradients.nbytes for local in self._buckets if not local.adds_on_host)
        # Parameters that other holders' edges cut have tensors of their own beside the buffers.
        cut = {tensor for local in self._buckets for tensor in local.cut_tensors()}
        weights += sum(tensor.nbytes for tensor in cut if tensor not in self.host_weights)
        on_host = self.host_gradients
        gradients += sum(main_grad(tensor).nbytes for tensor in cut if on_host is None or tensor not in on_host)
        return weights, gradients, self.optimizer.state_bytes()

    def host_bytes(self) -> int:
        """Bytes of its host's memory that the plan lets this rank hold."""
        gradients = self.host_gradients.on_host if self.host_gradients is not None else 0
        return self.optimizer.host_bytes() + gradients + self.host_weights.on_host

    def weights(self) -> dict[str, torch.Tensor]:
        """This rank's shards by canonical name, as the last update left them: of those on the host copies."""
        self.finish_gather()
        on_host = self.host_weights
        return {
            name: on_host.read(tensor) if tensor in on_host else tensor.detach()
            for name, (_, tensor) in self.parameters.items()
        }

    def finish_host_updates(self) -> None:
        """Wait for what the host still updates, before anyone looks at the optimizer's state."""
        if self._host is not None:
            self._host.finish()

    def finish_gather(self) -> None:
        """Wait for weights that are still on their way from the last update, before anyone looks at them."""
        self.finish_host_updates()
        self._gather.finish()

    def finish_loading(self, *, num_updates: int) -> None:
        """The tensors of the optimizer's state have been written: let every holder have the weights that they make.

        Gathers as those behind an update; collective over the holders of each bucket.
        """
        self.optimizer.finish_loading(num_updates=num_updates)
        self._gather.start()
        self._gather.finish()

    def gradient_sums(self) -> list[TensorSlice]:
        """The summed gradients that this rank has after :meth:`compute_gradients`, times the loss scale."""
        return list(self._sums.summed())

    def step(self, microbatches: Sequence[Microbatch] | None, *, wants_stop: bool = False) -> StepResult:
        """One step on the global batch; collective over the world.

        Args:
            microbatches: this rank's, in order; ``None`` where :func:`reads_data` is false.
            wants_stop: this rank has been told to end; all ranks hear of it in the result.
        """
        self.compute_gradients(microbatches)
        return self.update(wants_stop=wants_stop)

    def evaluate(self, microbatches: Sequence[Microbatch] | None) -> tuple[float, int]:
        """Sum of the token losses of a batch and how many tokens those are; collective over the world.

        The forward alone, without dropout.

        Args:
            microbatches: as those of :meth:`step`, but of a batch of :meth:`change_evaluation_batch`.
        """
        self.finish_gather()
        totals = torch.zeros(2, dtype=torch.float64, device=self._context.device)
        with self._context.timing.outside_steps():
            for module in self._modules:
                module.eval()
            self.host_weights.begin(_fetches(self._evaluation))
            loss = self._evaluator.run(StepInputs(microbatches=microbatches))
            for module in self._modules:
                module.train()
            if self._reports_loss:
                totals = torch.stack([loss, _count_tokens(microbatches)])
            dist.all_reduce(totals, group=self._context.world)
        loss_sum, num_tokens = totals.tolist()
        return loss_sum, int(num_tokens)

    def compute_gradients(self, microbatches: Sequence[Microbatch] | None) -> None:
        """The gradient of the mean token loss of the global batch, times the loss scale, summed over all holders.

        It is in every ``main_grad``, or with a distributed optimizer in the shards that this rank owns.
        """
        self.optimizer.begin()
        self.host_weights.begin(_fetches(self._program))
        self._num_tokens = _count_tokens(microbatches) if self._reports_loss else torch.zeros_like(self._num_tokens)
        loss = self._executor.run(
            StepInputs(
                microbatches=microbatches,
                loss_scale=self._start_loss_scale() if self._context.is_last else None,
                aux_loss_scale=self.scaler.scale if self.scaler is not None else 1.0,
            )
        )
        self._loss_sum = loss if self._reports_loss else torch.zeros_like(loss)

    def update(self, *, wants_stop: bool = False) -> StepResult:
        """Clip, and step the optimizer, or skip on all ranks; collective over the world."""
        background = self._background
        result = self.optimizer.agree(
            loss_sum=self._loss_sum,
            num_tokens=self._num_tokens,
            wants_stop=wants_stop,
            votes=background.votes() if background is not None else (),
        )
        if background is not None:
            background.decided(result.votes)
        if not result.skipped:
            # A rank that owns nothing still gathers what the others have updated.
            self._executor.update(partial(self._apply, result))
        else:
            self.optimizer.skip()
            # What was previewed is not gathered, so that no forward would wait until the old weights are back.
            self.finish_host_updates()
        return result

    def _apply(self, result: StepResult) -> None:
        if self._background is not None:
            self._background.wait_until_read()
        self.optimizer.apply(result)

    @property
    def _reports_loss(self) -> bool:
        """Tensor-parallel ranks of a last stage all have the whole loss; one of them reports it."""
        work = self._context.work
        return work is not None and self._context.is_last and work.placement.tp_rank == 0

    def not_finite(self) -> list[str]:
        """Which of ``loss`` and ``gradient`` of the last step is infinite or no number on this rank."""
        norms = [torch.linalg.vector_norm(each.tensor) for each in self.gradient_sums()]
        parts = {"loss": [self._loss_sum], "gradient": norms}
        return [what for what, values in parts.items() if not all(value.isfinite() for value in values)]

    def _start_loss_scale(self) -> Callable[[], torch.Tensor]:
        """Loss scale / (loss tokens of the global batch), which nobody needs before the first backward.

        All-reduce (sum) over the last stages of all replicas, beside the first forward.
        """
        total = self._num_tokens.clone()
        losses = self._context.losses
        pending = (
            self._gather.behind(lambda: dist.all_reduce(total, group=losses, async_op=True))
            if losses is not None
            else None
        )

        @cache
        def loss_scale() -> torch.Tensor:
            if pending is not None:
                wait_for_all([pending])
            return self._loss_scale_of(total)

        return loss_scale

    def _loss_scale_of(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """By what the sum of token losses is multiplied, if the global batch has so many loss tokens."""
        scale = self.scaler.scale if self.scaler is not None else 1.0
        return scale / num_tokens.clamp(min=1)


def _host_optimizer(
    context: ParallelContext, buckets: Sequence[LocalBucket], adam: AdamOptions, cores: Sequence[int] | None
) -> HostOptimizer | None:
    """What updates on the host, if the plan leaves something there for this rank."""
    left = [local for local in buckets if context.rank in local.bucket.on_host]
    if not left:
        return None
    # The next forward needs the lowest positions first.
    left.sort(key=lambda local: (local.bucket.position, -local.number))
    return HostOptimizer(
        [
            (local, place, group)
            for local in left
            for place, group in updated_places(local, decoupled=adam.decoupled is not None)
        ],
        speculates=any(work.stage.offload.speculate for work in context.stages),
        device=context.device,
        cores=cores or update_cores(local_rank=0, ranks=1),
        timing=context.timing,
    )


def _host_gradients(
    context: ParallelContext, buckets: Sequence[LocalBucket], host: HostOptimizer | None
) -> HostGradients | None:
    """What adds gradients up on the host, if the plan leaves some there for this rank."""
    if host is None or not any(local.adds_on_host for local in buckets):
        return None
    return HostGradients(
        {work.placement.stage: work.stage for work in context.stages},
        buckets,
        num_layers=context.plan.model.num_layers,
        device=context.device,
        host=host,
        timing=context.timing,
    )


def _fetches(program: Program) -> list[Action]:
    """What brings weights from the host, in the order of the computes."""
    return [queued.action for queued in program.queues.get("weights_in", ())]


def _count_tokens(microbatches: Sequence[Microbatch] | None) -> torch.Tensor:
    assert microbatches is not None, "a last stage reads labels"
    return torch.stack([batch.loss_mask_BS.sum() for batch in microbatches]).sum(dtype=torch.float64)


def reads_data(context: ParallelContext) -> bool:
    """Whether this rank needs microbatches: first stages for their tokens, last stages for their labels."""
    return context.is_first or context.is_last
