"""Counts the kernels that one pass of a local layer launches on CUDA, without one.

    python -m tests.helpers.launch_count                 counts, as JSON: model, kind, [forward, backward]

Layers are built as for CUDA and run on the CPU, and operators that compute are counted as they are dispatched. What is
one kernel on CUDA counts as one here, whatever the CPU makes of it: functions that torch's compiler fuses, and RMSNorm
(two in a backward: the gradients of its input and of its weight).
"""

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.profiling.built_parts import BuiltParts, LayersOfModel
from hetero.profiling.points import ProfilePoint
from hetero.profiling.profiled_plan import ProfiledModel
from hetero.profiling.stage_part import world_of_rank_0
from hetero.runtime import cpu_backend, layer_choice
from hetero.runtime.options import StageOptions
from hetero.spec.model import ModelSpec
from hetero.spec.profile import ModuleKind
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.models import gpt2_model, llama_model, moe_model

KINDS: tuple[ModuleKind, ...] = ("embedding", "attention", "mlp", "block", "head")

NO_KERNEL = frozenset(
    [
        *("view", "reshape", "_unsafe_view", "_reshape_alias", "as_strided", "alias", "detach", "lift_fresh"),
        *("t", "transpose", "permute", "expand", "squeeze", "unsqueeze"),
        *("slice", "select", "split", "split_with_sizes", "unbind", "chunk", "narrow"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
        *("_fused_sdp_choice", "allreduce_"),
    ]
)
"""Operators that make views or empty tensors, choose a kernel, or sum over a group of one rank."""

COMPILED: Mapping[str, tuple[str, ...]] = {
    "fused_bias_dropout": ("bias_dropout_add_fused_train",),
    "fused_bias_gelu": ("bias_gelu", "bias_gelu_back"),
    "fused_bias_swiglu": ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back"),
}
"""Functions of megatron-core's fusions that torch's compiler makes one kernel of on CUDA, by module."""

MODELS: Mapping[str, Callable[[], ModelSpec]] = {
    "llama": lambda: llama_model(num_query_groups=2),
    "gpt2": gpt2_model,
    "experts": moe_model,
}


class LaunchCounter(TorchDispatchMode):
    """Counts operators that compute, and whatever :meth:`one` wraps as one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch, which has no types there
        self.launches = 0
        self._depth = 0

    def one(self, function: Callable[..., Any], launches: int = 1) -> Callable[..., Any]:
        """Make ``function`` count as a number of launches, whatever it dispatches."""

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                return function(*args, **options)
            finally:
                self._depth -= 1
                self.launches += launches if self._depth == 0 else 0

        return counted

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.__name__.split(".")[0]
        self.launches += self._depth == 0 and name not in NO_KERNEL
        return function(*args, **(kwargs or {}))


class _RMSNorm(torch.autograd.Function):
    """Stands for RMSNorm: has its sizes and counts as its kernels, but does not compute its values."""

    @staticmethod
    def forward(context: Any, counter: LaunchCounter, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.counter = counter
        context.save_for_backward(rows, weight)
        normed: torch.Tensor = counter.one(torch.clone)(rows)
        return normed

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        rows, weight = context.saved_tensors
        clone = context.counter.one(torch.clone)
        return None, clone(rows), clone(weight)


@contextlib.contextmanager
def _as_on_cuda(counter: LaunchCounter) -> Iterator[None]:
    """Let the runtime take what it has compiled on CUDA, each counting as one launch."""
    cpu_backend.install()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(layer_choice, "runs_cuda", lambda *_: True))
        for module_name, names in COMPILED.items():
            module = importlib.import_module(f"megatron.core.fusions.{module_name}")
            for name in names:
                stack.enter_context(patch.object(module, name, counter.one(getattr(module, name))))
        stack.enter_context(patch.object(torch.nn.functional, "rms_norm", _norm_counted_by(counter)))
        yield


def _norm_counted_by(counter: LaunchCounter) -> Callable[..., Any]:
    def rms_norm(rows: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None = None) -> Any:
        return _RMSNorm.apply(counter, rows, weight)  # type: ignore[no-untyped-call]  # of torch, without types there

    return rms_norm


def count_launches(model: ModelSpec, kind: ModuleKind) -> tuple[int, int]:
    """Count those of a forward and of a backward of one layer, or half of one, in bf16, without dropout.

    A pass of its own adds each gradient to its sum: a CPU has no product of bf16 that adds to fp32.
    """
    profiled = ProfiledModel(model=model, device=SHIPPED_DEVICES.of("cpu"), seq_length=16, precision="bf16")
    options = StageOptions(
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=None, gradient_accumulation_fusion=False
    )
    point = ProfilePoint(what="passes", kind=kind, tp=1, micro_batch_size=2)
    counter, counts = LaunchCounter(), []
    world_size = profiled.plan(tp=1, micro_batch_size=1).world_size
    with _as_on_cuda(counter), world_of_rank_0(world_size=world_size):
        part = BuiltParts(torch.device("cpu"), world_size=world_size).take(LayersOfModel(profiled, options), point)
        part.forward()
        part.backward()
        for run in (part.forward, part.backward):
            counter.launches = 0
            with counter:
                run()
            counts.append(counter.launches)
    forward, backward = counts
    return forward, backward


def main() -> None:
    found = {name: {kind: count_launches(model(), kind) for kind in KINDS} for name, model in MODELS.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
