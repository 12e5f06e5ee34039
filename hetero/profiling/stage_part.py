"""Builds one part of a model as the runtime builds its stages, and runs its passes on one device.

Tensor-parallel ranks that are not there are those of torch's ``fake`` process group, which moves nothing: the sizes are
a rank's, and the times have no collectives in them.

Tensor shapes: S rows of a sequence, B samples of a microbatch, H hidden size.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.plan.ir import Plan
from hetero.profiling.profiled_plan import STAGE_OF
from hetero.runtime import mcore
from hetero.runtime.buckets import local_buckets
from hetero.runtime.dtypes import GRADIENT_DTYPES
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.main_grad import add_grad, comes_later, drop_grad
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions, Optimizer, StepResult
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import build_stages
from hetero.spec.profile import ModuleKind

SEED = 1234

ADAM = AdamOptions(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0)
"""Of a usual training; what an update takes depends on none of them, but for the product with the clip factor."""

_NORM = 2 * ADAM.clip_grad
"""Of the gradient, which is clipped therefore."""


@contextlib.contextmanager
def one_rank(plan: Plan, kind: ModuleKind, device: torch.device) -> Iterator[ParallelContext]:
    """This process as the first rank of the stage that has ``kind``, of a world in which nobody else is."""
    number = STAGE_OF[kind]
    rank = plan.replicas[0].stages[number].ranks[0]
    # Each process group that torch makes puts a rank before the messages of exceptions, around those of the last one.
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        yield create_groups(plan, device=device)
    finally:
        mcore.forget_groups()
        dist.destroy_process_group()
        sys.excepthook = excepthook


class StagePart:
    """A block, half of one, the embedding or the head, with weights, gradients and optimizer as in a training.

    Args:
        kind: of the stages at the ends, their layer is dropped, and the embedding, or norm, head and loss, are left.
    """

    def __init__(self, context: ParallelContext, kind: ModuleKind, *, options: StageOptions) -> None:
        self._context = context
        self._device = context.device
        (self._model,) = build_stages(context, options=options, seed=SEED)
        buckets = local_buckets(
            context, self._model.parameters, bucket_numel=1, gradient_dtype=GRADIENT_DTYPES[context.plan.precision]
        )
        module = self._model.module
        if kind in ("embedding", "head"):
            module.decoder.layers = torch.nn.ModuleList()
        kept = set(module.parameters())
        self._buckets = [local for local in buckets if local.tensors() <= kept]
        for tensor in kept:
            tensor.register_post_accumulate_grad_hook(drop_grad if comes_later(tensor) else add_grad)
        self._input_SBH = None if module.pre_process else self._hidden()
        self._batch = self._made_up_batch() if module.pre_process or module.post_process else None
        self._gradient: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._optimizer: Optimizer | None = None

    @property
    def choice(self) -> LayerChoice:
        """Whose layers they are."""
        return self._model.choice

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
        stage, plan = self._context.stages[0].stage, self._context.plan
        shape = (plan.seq_length, stage.micro_batch_size, plan.model.hidden_size)
        return torch.randn(shape, device=self._device).to(self._model.dtype)

    def _made_up_batch(self) -> Microbatch:
        plan = self._context.plan
        shape = (self._context.stages[0].stage.micro_batch_size, plan.seq_length)
        tokens = torch.randint(plan.model.vocab_size, shape, device=self._device)
        positions = torch.arange(plan.seq_length, device=self._device).expand(shape).contiguous()
        return Microbatch(tokens, positions, tokens, torch.ones(shape, device=self._device))


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """The most memory that ``work`` has allocated at a time beyond what was there before it.

    By the allocator's own count on a GPU; elsewhere of the tensors that operators return, without what they allocate
    for themselves.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        work()
        most: int = torch.cuda.max_memory_allocated(device)
        return most - before
    allocations = _Allocations()
    with allocations:
        work()
    return allocations.most


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch, which has no types there
        self.most = 0
        self._level = 0
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
            self._level -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self._level += num_bytes
        self.most = max(self.most, self._level)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
