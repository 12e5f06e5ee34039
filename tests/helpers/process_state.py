"""What a test leaves behind in the process that it ran in. To run the next one there, nothing may be left.

What every training leaves is put back: random numbers, the default dtype, the number of threads, the environment, the
folder, and the globals in which megatron-core and torch keep groups. Other changes are only found, and the process is
unfit for another test: of functions and methods, of global dicts, lists and sets, threads, signal handlers, open files.
Nobody looks at attributes of objects that a module keeps, and at caches of functions.
"""

import functools
import gc
import operator
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

PUT_BACK = (
    "torch.cuda",
    "torch.cuda.random",
    "torch.distributed.distributed_c10d",
    "megatron.core.fusions.fused_bias_swiglu",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.router",
)
"""Modules whose globals, and those of their classes, training changes."""

WATCHED = ("torch", "torch.distributed")
WATCHED_PACKAGES = ("hetero.", "megatron.", "tests.", "tools.")
"""Modules of which tests replace parts, and packages with all their modules."""

MOST_FILES = 300
"""Sockets of a group stay open for a moment after its end; more than these are a leak."""

MOST_THREADS = 16
"""Of the operating system. What C++ keeps alive, where no garbage is looked for, keeps the threads of its groups, which
spin once the other ranks have gone: a few hundred stop the machine."""

_FILLED_IN_LATER = ("__slotnames__", "_abc_impl", "__warningregistry__")
"""What ``copyreg``, ``abc`` and ``warnings`` set when they please."""


_OLD_TENSOR_TYPE = type(torch.FloatTensor)
"""Of ``torch.FloatTensor`` and its like, whose 740 attributes each nobody can set."""


class ProcessState:
    """The state of a process before its first test.

    Who forks may make it before: what modules hold is the same in the fork, and takes a while to look at.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._seen: dict[str, list[_Namespace]] = {}
        self._see_new_modules()
        self.renew()

    def renew(self) -> None:
        """In a fork: what it has of its own."""
        self._environment = dict(os.environ)
        self._folder = Path.cwd()
        self._path = list(sys.path)
        self._filters = list(warnings.filters)
        self._handlers = _signal_handlers()

    def begin(self) -> None:
        """Before a test, but after the import of its module."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        warnings.filters[:] = self._filters  # type: ignore[index]  # its stub knows no list, which it is
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self._see_new_modules()

    def end(self) -> list[str]:
        """Put back what can be; what is left is named."""
        for name in PUT_BACK:
            for namespace in self._seen.get(name, ()):
                namespace.put_back()
        # It is keyed by the module, which it keeps alive with all its groups.
        RotaryEmbedding.forward.cache_clear()
        gc.collect()
        return list(self._left())

    def _see_new_modules(self) -> None:
        if not (new := sys.modules.keys() - self._known):
            return
        self._known |= new
        for name in new:
            if _is_watched(name) and isinstance(module := sys.modules[name], ModuleType):
                self._seen[name] = list(_namespaces(module))
        # They stay: nobody has to look through them for garbage after every test.
        gc.freeze()

    def _left(self) -> Iterator[str]:
        for namespaces in self._seen.values():
            for namespace in namespaces:
                for key in namespace.differences():
                    yield f"{namespace.name}.{key}"
        for thread in threading.enumerate():
            if thread is not threading.main_thread():
                yield f"thread {thread.name}"
        for number, handler in _signal_handlers().items():
            if handler != self._handlers[number]:
                yield f"handler of signal {number}"
        num_files = len(list(Path("/proc/self/fd").iterdir()))
        if num_files > MOST_FILES:
            yield f"{num_files} open files"
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        if num_threads > MOST_THREADS:
            yield f"{num_threads} threads"


@functools.cache
def state_of_this_process() -> ProcessState:
    """The one of a fork server, which its forks find made."""
    return ProcessState()


class _Namespace:
    """What a module, a class or a global container held when it was first seen."""

    def __init__(self, name: str, owner: Any, live: Any) -> None:
        self.name = name
        self._owner = owner
        self._live = live
        self._keys, self._values = _entries(live)

    def differences(self) -> list[Any]:
        """Keys of entries that are other objects, new or gone."""
        keys, values = _entries(self._live)
        if len(keys) == len(self._keys) and all(map(operator.is_, values, self._values)):
            return []
        before, now = dict(zip(self._keys, self._values, strict=True)), dict(zip(keys, values, strict=True))
        changed = [key for key in before.keys() | now.keys() if before.get(key, self) is not now.get(key, self)]
        return [key for key in changed if not _comes_by_itself(key, now.get(key))]

    def put_back(self) -> None:
        if isinstance(self._owner, ModuleType | type):
            before = dict(zip(self._keys, self._values, strict=True))
            for key in self.differences():
                if key in before:
                    setattr(self._owner, key, before[key])
                else:
                    delattr(self._owner, key)


def _entries(live: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(live, Mapping):
        return list(live.keys()), list(live.values())
    values = list(live)
    return values if isinstance(live, set) else list(range(len(values))), values


def _comes_by_itself(key: Any, now: Any) -> bool:
    """Modules that are imported later, what Python keeps in a namespace for itself, and the ``__init__`` that
    ``typing.Protocol`` gives a class at its first call."""
    return isinstance(now, ModuleType) or key in _FILLED_IN_LATER or now is object.__init__


def _is_watched(name: str) -> bool:
    return name in WATCHED or name in PUT_BACK or name.startswith(WATCHED_PACKAGES)


def _namespaces(module: ModuleType) -> Iterator[_Namespace]:
    """The module itself, its global containers, and its classes."""
    name = module.__name__
    yield _Namespace(name, module, vars(module))
    for key, value in list(vars(module).items()):
        if key.startswith("__"):
            continue
        if isinstance(value, dict | list | set):
            yield _Namespace(f"{name}.{key}", None, value)
        elif isinstance(value, type) and value.__module__ == name and not isinstance(value, _OLD_TENSOR_TYPE):
            yield _Namespace(f"{name}.{key}", value, vars(value))


def _signal_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}
