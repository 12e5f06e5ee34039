"""A few training steps under a plan, small enough for a test, with everything that a comparison wants to see."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.plan.batch_shares import with_batch_size
from hetero.plan.batch_sizes import BatchSizes, VaryingBatch
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.main_grad import main_grad
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.shared_memory_group import with_shared_memory

SMALL_BUCKETS = DataParallelOptions(bucket_numel=3000)
"""A tiny model has several."""

ADAM = AdamOptions(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=0.5)


Sums = list[tuple[str, tuple[int, ...], np.ndarray]]
"""Canonical name, offsets in the whole parameter, and a copy of the box there."""


@dataclass
class Trace:
    """What one rank saw. Weights are this rank's shards by canonical name; ``tp_rank`` and ``tp`` tell which.

    gradients: after every step, the boxes of the gradient that this rank has the sums of.
    optimizer_bytes: of master weights and moments.
    weights: after every step; empty where nobody looked.
    host_counts, host_bytes: what the host did and holds, where the plan leaves something to it.
    gradients_on_way: the most bytes of gradients on the device that add up on the host.
    weights_there: the most bytes of weights on the device that live on the host.
    static_bytes: weights, gradients and optimizer state on the device.
    activations_on_way, activations_on_host: the most bytes of a step, where the plan leaves activations to it.
    """

    tp: int = 1
    tp_rank: int = 0
    optimizer_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list["Sums"] = field(default_factory=list)
    weights: list[dict[str, np.ndarray]] = field(default_factory=list)
    host_counts: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    gradients_on_way: int = 0
    weights_there: int = 0
    static_bytes: tuple[int, int, int] = (0, 0, 0)
    activations_on_way: int = 0
    activations_on_host: int = 0

    def first(self, num_steps: int) -> "Trace":
        """What was seen in so many steps; all are alike, so it is what a shorter training shows."""
        assert num_steps <= len(self.losses)
        return dataclasses.replace(
            self,
            losses=self.losses[:num_steps],
            grad_norms=self.grad_norms[:num_steps],
            gradients=self.gradients[:num_steps],
            weights=self.weights[:num_steps],
        )


def trace_of(plan: Plan, rank: int) -> Trace:
    """Which shards ``rank`` holds."""
    place = plan.placement(rank)
    assert place is not None
    return Trace(tp=plan.replicas[place.replica].stages[place.stage].tp, tp_rank=place.tp_rank)


def sample(index: int, *, seq_length: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and loss mask [S] of sample ``index``: some tokens do not count, and not equally many each."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, vocab_size, (seq_length + 1,), generator=generator)
    mask = (torch.rand(seq_length, generator=generator) > 0.1 * (index % 4)).float()
    return ids[:-1], ids[1:], mask


def microbatches(plan: Plan, rank: int, *, step: int, first_sample: int | None = None) -> list[Microbatch]:
    """The microbatches of ``rank`` by the order that the plan's docstring promises, written out independently.

    Args:
        first_sample: of the step, where those before had batches of other sizes.
    """
    place = plan.placement(rank)
    assert place is not None
    replica = plan.replicas[place.replica]
    stage = replica.stages[place.stage]
    block = step * plan.global_batch_size if first_sample is None else first_sample
    block += sum(r.num_samples for r in plan.replicas[: place.replica])
    batches = []
    for m in range(replica.num_samples // (stage.micro_batch_size * stage.dp)):
        first = block + (m * stage.dp + place.dp_rank) * stage.micro_batch_size
        rows = [
            sample(i, seq_length=plan.seq_length, vocab_size=plan.model.vocab_size)
            for i in range(first, first + stage.micro_batch_size)
        ]
        tokens, labels, masks = (torch.stack(column) for column in zip(*rows, strict=True))
        positions = torch.arange(plan.seq_length).expand_as(tokens)
        batches.append(Microbatch(tokens, positions, labels, masks))
    return batches


def data_of(
    context: ParallelContext, *, first_step: int = 0, varying_batch: VaryingBatch | None = None
) -> Iterator[list[Microbatch]] | None:
    """The microbatches of this rank from ``first_step`` on; ``None`` if it needs none."""
    if not reads_data(context):
        return None
    sizes = BatchSizes(context.plan.global_batch_size, varying_batch)
    return (
        microbatches(
            with_batch_size(context.plan, sizes.size(step)),
            context.rank,
            step=step,
            first_sample=sizes.first_sample(step),
        )
        for step in itertools.count(first_step)
    )


def one_process_plan(plan: Plan, *, micro_batch_size: int = 1) -> Plan:
    """The same training on one rank."""
    return uniform_plan(
        UniformLayout(
            model=plan.model,
            world_size=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=plan.global_batch_size,
            seq_length=plan.seq_length,
            device="cpu",
            precision=plan.precision,
        )
    )


def spoil_gradient(trainer: Trainer, name: str, value: float) -> RemovableHandle:
    """Put ``value`` into one element of a parameter's sum of gradients whenever its module runs, until it is removed.

    A sum of gradients and it is no finite number either, whether autograd or a product adds to the sum.
    """
    _, tensor = trainer.parameters[name]
    modules = (each for whole in trainer._modules for each in whole.modules())
    (module,) = (each for each in modules if any(own is tensor for own in each.parameters(recurse=False)))

    def put_value(module: torch.nn.Module, args: object) -> None:
        main_grad(tensor).view(-1)[-1] = value

    hook: RemovableHandle = module.register_forward_pre_hook(put_value)
    return hook


def train(
    rank: int,
    plan: Plan,
    num_steps: int,
    data_parallel: DataParallelOptions = SMALL_BUCKETS,
    options: StageOptions | None = None,
    loss_scale: LossScaleOptions | None = None,
    weights_at: Literal["every step", "the end"] = "every step",
    device: str = "cpu",
    adam: AdamOptions = ADAM,
    prepare: Callable[[Trainer, int], None] | None = None,
    tensor_parallelism: Literal["shared memory", "its own groups"] = "shared memory",
) -> Trace | None:
    """Run on every rank of ``plan``. Returns ``None`` on idle ranks.

    tensor_parallelism: what its messages go over; on a GPU always its own groups.
    prepare: called with the trainer and the rank before the first step.
    weights_at: when to look at the weights. Who looks waits for those that are being gathered, and leaves the next
        forward nothing to wait for.
    """
    index = torch.cuda.current_device() if device == "cuda" else None
    context = create_groups(plan, device=torch.device(device, index) if index is not None else torch.device(device))
    if device == "cpu" and tensor_parallelism == "shared memory":
        context = with_shared_memory(context)
    trainer = Trainer(
        context,
        options=options or StageOptions(init_method_std=0.1),
        adam=adam,
        seed=7,
        data_parallel=data_parallel,
        loss_scale=loss_scale,
    )
    if prepare is not None:
        prepare(trainer, rank)
    session = TrainingSession(context, trainer, data=data_of(context))
    work = context.work
    trace = Trace(tp=work.stage.tp, tp_rank=work.placement.tp_rank) if work is not None else None
    for step in range(num_steps):
        session.compute_gradients()
        if trace is not None:
            trace.gradients.append(sums_of(trainer))
        result = session.update()
        if trace is not None:
            trace.losses.append(result.loss)
            trace.grad_norms.append(result.grad_norm)
            looks = weights_at == "every step" or step == num_steps - 1
            weights = session.weights() if looks else {}
            trace.weights.append({name: tensor.double().cpu().numpy().copy() for name, tensor in weights.items()})
            trace.optimizer_bytes = trainer.optimizer.state_bytes()
    if trace is not None and trainer._host is not None:
        trace.host_counts, trace.host_bytes = trainer._host.counts, trainer.host_bytes()
    if trace is not None:
        trace.static_bytes = trainer.static_bytes()
        if (gradients := trainer.host_gradients) is not None:
            assert gradients.on_device.now == 0, "nothing is left of a step"
            trace.gradients_on_way = gradients.on_device.most
        weights_of_host = trainer.host_weights
        assert weights_of_host.on_device.now == 0, "nothing is left of a step"
        trace.weights_there = weights_of_host.on_device.most
        activations = trainer.host_activations
        assert activations.on_device.now == activations.on_host.now == 0, "nothing is left of a step"
        trace.activations_on_way, trace.activations_on_host = activations.on_device.most, activations.on_host.most
    return trace


@dataclass(frozen=True)
class Training:
    """A plan and how it is executed."""

    plan: Plan
    data_parallel: DataParallelOptions = SMALL_BUCKETS
    options: StageOptions | None = None
    loss_scale: LossScaleOptions | None = None
    weights_at: Literal["every step", "the end"] = "every step"
    tensor_parallelism: Literal["shared memory", "its own groups"] = "shared memory"


def train_each(rank: int, trainings: dict[str, Training], num_steps: int) -> dict[str, Trace | None]:
    """One training after the other on the same ranks."""
    traces: dict[str, Trace | None] = {}
    for name, each in trainings.items():
        try:
            traces[name] = train(
                rank,
                each.plan,
                num_steps,
                each.data_parallel,
                each.options,
                loss_scale=each.loss_scale,
                weights_at=each.weights_at,
                tensor_parallelism=each.tensor_parallelism,
            )
        except BaseException as error:
            error.add_note(f"in the training {name!r}")
            raise
    return traces


def trained(trainings: dict[str, Training], num_steps: int) -> dict[str, list[Trace | None]]:
    """What every rank saw of each training. They have as many ranks, and share one visit of those."""
    (world_size,) = {each.plan.world_size for each in trainings.values()}
    by_rank = run_ranks(train_each, world_size, trainings, num_steps, timeout_s=30 * (1 + len(trainings)))
    return {name: [traces[name] for traces in by_rank] for name in trainings}


MOST_STEPS = 3


def one_process(plan: Plan, num_steps: int) -> Trace:
    """The same training in one process, with whole backwards, asked once for all test files.

    All steps are alike, so a shorter training is the beginning of a longer one.
    """
    assert num_steps <= MOST_STEPS
    alone: Trace = run_alone(train, one_process_plan(plan), MOST_STEPS)
    return alone.first(num_steps)


def sums_of(trainer: Trainer) -> Sums:
    """The gradient sums that this rank has."""
    return [
        (each.name.removeprefix("gradients/"), each.offsets, each.tensor.cpu().numpy().copy())
        for each in trainer.gradient_sums()
    ]
