"""Lets the runtime believe on a CPU that it is on CUDA: what it then compiles, in which thread it then runs backwards.

A machine with CUDA differs in more than speed: megatron-core's fused functions are compiled, the runtime warms up,
copies go through streams and pinned memory, and autograd runs backwards in a thread of its own.
"""

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from megatron.core.pipeline_parallel import schedules

from hetero.runtime import layer_choice
from tests.helpers import played_streams


@contextlib.contextmanager
def playing_cuda() -> Iterator[None]:
    """Let the runtime decide as on CUDA, with streams, events and pinned memory played.

    ``torch.cuda.is_available()`` stays false: torch's compiler asks it, and then the driver.
    """
    with contextlib.ExitStack() as patches:
        to = torch.Tensor.to
        patches.enter_context(played_streams.played_cuda())
        # The compiler has no graph for a method that was replaced: what a prefetcher copies is there at once.
        patches.enter_context(mock.patch.object(torch.Tensor, "to", to))
        _replace_everywhere(patches, layer_choice.runs_cuda, lambda device: True)
        yield


@contextlib.contextmanager
def compiled_functions(backend: str = "aot_eager") -> Iterator[None]:
    """Compile what megatron-core compiles while it is imported where there is CUDA, and nowhere else here.

    ``aot_eager`` makes graphs and their guards as torch's own backend does, and generates no code from them.
    """
    torch._dynamo.reset()
    with contextlib.ExitStack() as patches:
        patches.enter_context(torch._dynamo.config.patch(fail_on_recompile_limit_hit=True))
        for holder, name in _functions_to_compile():
            function = inspect.getattr_static(holder, name)
            compiled = torch.compile(function, backend=backend)
            if inspect.isclass(holder):
                patches.enter_context(mock.patch.object(holder, name, compiled))
            else:
                _replace_everywhere(patches, function, compiled)
        yield
    torch._dynamo.reset()


def _functions_to_compile() -> list[tuple[Any, str]]:
    """Return modules and classes of megatron-core, each with the name of a function that its decorator compiles."""
    found: list[tuple[Any, str]] = []
    for module in _modules("megatron.core."):
        path = Path(getattr(module, "__file__", None) or "")
        source = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
        if "@jit_fuser" not in source:
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found += [(vars(module)[node.name], name) for name in _decorated(node.body)]
            else:
                found += [(module, name) for name in _decorated([node])]
    return found


def _decorated(body: list[ast.stmt]) -> list[str]:
    return [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(each, ast.Name) and each.id == "jit_fuser" for each in node.decorator_list)
    ]


def _replace_everywhere(
    patches: contextlib.ExitStack, original: object, replacement: object, *, but: ModuleType | None = None
) -> None:
    """Replace an object in all modules that have it by its name, ``but`` one."""
    for module in _modules("megatron.", "hetero."):
        for name, value in list(vars(module).items()):
            if value is original and module is not but:
                patches.enter_context(mock.patch.object(module, name, replacement))


def _modules(*prefixes: str) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(prefixes) and module is not None]


@contextlib.contextmanager
def backwards_in_another_thread() -> Iterator[None]:
    """Run backwards of stages in one other thread, as autograd does for each device but the CPU.

    Whatever is a thread's own, contexts and modes of torch among them, is then not that of the thread that runs
    forwards. A forward within a backward, which recomputation has, runs in the thread of the backward, as there.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="autograd") as thread, contextlib.ExitStack() as patches:

        def run_there(output: torch.Tensor, gradient: torch.Tensor) -> None:
            thread.submit(schedules.custom_backward, output, gradient).result()

        _replace_everywhere(patches, schedules.custom_backward, run_there, but=schedules)
        yield
