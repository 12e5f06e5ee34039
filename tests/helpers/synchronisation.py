"""Counts the calls for which a host would wait for a GPU, in a run without one.

Where a value of a tensor goes to the host, or the shape of a result depends on values, the host has to wait for
everything that it has put into the stream. On the CPU such calls cost nothing, so nobody notices them. ``torch.cuda``
would (``set_sync_debug_mode``); here they are found by name, among all that Python and autograd call. What a kernel
reads of its own Python numbers is not among them, nor is what only CUDA runs: tests/gpu/test_hot_loop.py looks there.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

VALUES = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Methods that bring values of a tensor to the host."""

FROM_PYTHON = {"tensor", "as_tensor"}
"""Functions that make a tensor of Python numbers in pageable memory, and copy it to where it is asked for."""

OPERATORS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
}
"""Of ATen, with a value for the host or a shape that depends on values."""


ON_THE_HOST = {"megatron.core.tensor_parallel.random"}
"""Modules whose tensors never were on a device: the states of generators, which this one compares."""


class SynchronisingCalls:
    """Notes every call between ``with`` and its end, a call of Python's as one with the operators that it leads to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> "SynchronisingCalls":
        for mode in (_Functions(self.names), _Operators(self.names)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Functions(TorchFunctionMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = kwargs or {}
        if name not in VALUES and not (name in FROM_PYTHON and given.get("device") is not None):
            return func(*args, **given)
        before = len(self._names)
        result = func(*args, **given)
        self._names[before:] = [] if sys._getframe(1).f_globals["__name__"] in ON_THE_HOST else [name]
        return result


class _Operators(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in OPERATORS or _is_chosen_by_a_mask(name, args):
            self._names.append(name)
        return func(*args, **(kwargs or {}))


def _is_chosen_by_a_mask(name: str, args: Sequence[Any]) -> bool:
    """Elements are read or written where a mask is true. A single number is filled in without counting them."""
    if name not in ("index", "index_put_", "index_put", "_index_put_impl_"):
        return False
    masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masks and (name == "index" or args[2].numel() != 1)
