"""Builds one part of a model as the runtime builds its stages, and runs its passes on one device.

Tensor-parallel ranks that are not there are those of torch's ``fake`` process group, which moves nothing: the sizes are
a rank's, and the times have no collectives in them.

Tensor shapes: S rows of a sequence, B samples of a microbatch, H hidden size.
"""

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime import mcore
from hetero.runtime.attention import attention_that_ran
from hetero.runtime.buckets import local_buckets
from hetero.runtime.dtypes import GRADIENT_DTYPES
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.main_grad import add_grad, comes_later, drop_grad
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions, Optimizer, StepResult
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import StageModel, build_stages
from hetero.spec.profile import AttentionKernel, ModuleKind

SEED = 1234

ADAM = AdamOptions(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0)
"""Of a usual training; what an update takes depends on none of them, but for the product with the clip factor."""

_NORM = 2 * ADAM.clip_grad
"""Of the gradient, which is clipped therefore."""

_WEIGHTS_STD = 0.02
"""What a product takes does not depend on its factors, but what power it draws does: zeros would be faster."""


@contextlib.contextmanager
def world_of_rank_0(*, world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a world that has no other process, and in which no message is sent."""
    # Each process group that torch makes puts a rank before the messages of exceptions, around those of the last one.
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        mcore.forget_groups()
        dist.destroy_process_group()
        sys.excepthook = excepthook


class StagePart:
    """A block, half of one, the embedding or the head, with weights, gradients and optimizer as in a training.

    It runs microbatches of any size, one after another. Weights are random, and not those of a training.

    Args:
        context: of rank 0, which holds the stage with ``kind`` alone.
        kind: of the stages at the ends, their layer is dropped, and the embedding, or norm, head and loss, are left.
        options: with no ``init_method_std``: a profile needs no weights that are the same under every plan.
    """

    def __init__(self, context: ParallelContext, kind: ModuleKind, *, options: StageOptions) -> None:
        assert options.init_method_std is None, "drawing them takes longer than all measurements"
        self._context = context
        self._device = context.device
        (model,) = build_stages(context, options=options, seed=SEED)
        buckets = local_buckets(
            context, model.parameters, bucket_numel=1, gradient_dtype=GRADIENT_DTYPES[context.plan.precision]
        )
        module = model.module
        if kind in ("embedding", "head"):
            module.decoder.layers = torch.nn.ModuleList()
        kept = set(module.parameters())
        self._model = dataclasses.replace(
            model, parameters={name: each for name, each in model.parameters.items() if each[1] in kept}
        )
        _fill(self._model)
        self._buckets = [local for local in buckets if local.tensors() <= kept]
        for tensor in kept:
            tensor.register_post_accumulate_grad_hook(drop_grad if comes_later(tensor) else add_grad)
        self._micro_batch_size = 0
        self._input_SBH: torch.Tensor | None = None
        self._batch: Microbatch | None = None
        self._gradient: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._optimizer: Optimizer | None = None

    def take_turn(self, *, micro_batch_size: int) -> None:
        """Run microbatches of this size from now on, and let megatron-core's globals be those of this part."""
        (work,) = self._context.stages
        num_stages = len(self._context.plan.replicas[work.placement.replica].stages)
        mcore.install_parallel_state(mcore.process_group_collection(work, num_stages=num_stages))
        if micro_batch_size == self._micro_batch_size:
            return
        self._micro_batch_size = micro_batch_size
        self._gradient = self._output = None
        module = self._model.module
        self._input_SBH = None if module.pre_process else self._hidden()
        self._batch = self._made_up_batch() if module.pre_process or module.post_process else None

    @property
    def choice(self) -> LayerChoice:
        """Whose layers they are."""
        return self._model.choice

    @property
    def attention(self) -> AttentionKernel | None:
        """The kernel of attention that the last forward ran; ``None`` without attention, or where it is not known."""
        return attention_that_ran(self._model.module)

    @property
    def parameters(self) -> int:
        """Elements of its weights on this rank."""
        return sum(tensor.numel() for local in self._buckets for tensor in local.tensors())

    @property
    def output_bytes(self) -> int:
        """Of what the last forward handed on; the head's is the loss of every token."""
        return self._output.nbytes if self._output is not None else 0

    def forward(self) -> None:
        """F, as :class:`hetero.runtime.stage_runner.StageRunner` runs it."""
        given = self._input_SBH.detach().requires_grad_() if self._input_SBH is not None else None
        output = self._model.forward(given, self._batch)
        if self._model.module.post_process:
            assert self._batch is not None, "a last stage reads labels"
            output = (output * self._batch.loss_mask_BS).sum()
        if self._gradient is None:
            self._gradient = torch.full_like(output, 1e-3, requires_grad=False)
        self._output = output

    def backward(self) -> None:
        """B, or I where the stage splits its backwards."""
        assert self._output is not None, "a forward comes first"
        torch.autograd.backward(self._output, self._gradient)
        self._output = None
        if self._model.delayed is not None:
            self._model.delayed.end_of_backward(0)

    def weight_gradients(self) -> None:
        """W: the gradients that :meth:`backward` has left for later."""
        assert self._model.delayed is not None, "the plan splits no backward"
        self._model.delayed.compute(0, ready=add_grad)

    def update(self) -> None:
        """The norm, and a clipped update of AdamW, as a step ends."""
        if self._optimizer is None:
            for local in self._buckets:
                local.gradients.fill_(1e-3)
            self._optimizer = Optimizer(self._context, self._buckets, ADAM)
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        self._optimizer.agree(loss_sum=nothing, num_tokens=nothing)
        self._optimizer.apply(StepResult(0.0, 1, _NORM, skipped=False))

    def saved_bytes(self) -> int:
        """What a forward saves for its backward, weights not counted, each storage once."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._model.module.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.forward()
        return sum(storage.nbytes() for storage in kept.values())

    def _hidden(self) -> torch.Tensor:
        plan = self._context.plan
        shape = (plan.seq_length, self._micro_batch_size, plan.model.hidden_size)
        return torch.randn(shape, device=self._device).to(self._model.dtype)

    def _made_up_batch(self) -> Microbatch:
        plan = self._context.plan
        shape = (self._micro_batch_size, plan.seq_length)
        tokens = torch.randint(plan.model.vocab_size, shape, device=self._device)
        positions = torch.arange(plan.seq_length, device=self._device).expand(shape).contiguous()
        return Microbatch(tokens, positions, tokens, torch.ones(shape, device=self._device))


@torch.no_grad()
def _fill(model: StageModel) -> None:
    """Give weights values on their device, in which no product overflows."""
    for parameter, tensor in model.parameters.values():
        match parameter.init:
            case "zeros":
                tensor.zero_()
            case "ones":
                tensor.fill_(1.0)
            case _:
                tensor.normal_(std=_WEIGHTS_STD)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedBytes:
    """What some work has allocated beyond what was there before it.

    peak: the most at a time.
    kept: what is still there at its end.
    """

    peak: int
    kept: int


def allocated_bytes(work: Callable[[], None], device: torch.device) -> AllocatedBytes:
    """Run ``work`` and return what it has allocated.

    By the allocator's own count on a GPU; elsewhere of the tensors that operators return, without what they allocate
    for themselves.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        after = torch.cuda.memory_allocated(device)
        return AllocatedBytes(peak=torch.cuda.max_memory_allocated(device) - before, kept=after - before)
    allocations = _Allocations()
    with allocations:
        work()
    return AllocatedBytes(peak=allocations.most, kept=allocations.level)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch, which has no types there
        self.most = 0
        self.level = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {_storage(each)._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._count(_storage(each), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in given or key in self._known:
            return

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.level -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.level += num_bytes
        self.most = max(self.most, self.level)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
