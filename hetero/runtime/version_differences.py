"""All that differs among the supported versions of megatron-core, torch and Python.

One function or constant for each difference; its text begins with the versions that need it, so that dropping a version
is deleting what names it. Which version is there is seen from what it has, never from its number. Nothing here imports
megatron-core: :mod:`.cpu_backend` has to run before that.
"""

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

TRITON_KERNELS = frozenset(
    {
        "megatron.core.transformer.moe.paged_stash",  # 0.18
        "megatron.core.transformer.moe.ops.paged_stash",  # 0.19
    }
)
"""megatron-core 0.18 and newer: modules of its layers that import Triton whether it is installed or not."""


def define_kernels_without_triton(modules: frozenset[str] = TRITON_KERNELS) -> None:
    """megatron-core 0.18 and newer: let ``modules`` be imported where Triton cannot be.

    torch's builds for CPUs come without it. The kernels serve ``moe_paged_stash``, which this runtime never sets. All
    other modules ask whether there is Triton, and still find none. Safe to call again.
    """
    if not any(isinstance(finder, _KernelModules) and finder.names == modules for finder in sys.meta_path):
        sys.meta_path.insert(0, _KernelModules(modules))


def _has_triton() -> bool:
    """Return whether Triton can be imported as a whole, which a folder left by an uninstallation cannot."""
    try:
        importlib.import_module("triton.language")
    except ImportError:
        return False
    return True


class _KernelModules(MetaPathFinder):
    """Finds modules that define Triton's kernels; where there is no Triton, they are loaded with a stand-in for it."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names or _has_triton():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _KernelLoader(fullname, spec.origin)
        return spec


class _KernelLoader(SourceFileLoader):
    """Runs one module whose own ``import triton`` gives the stand-in."""

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import_with_stand_in}
        super().exec_module(module)


_TRITON = SimpleNamespace(jit=lambda kernel: kernel, language=SimpleNamespace(constexpr=object))
"""What definitions of kernels need of Triton; to launch one fails, as a function has no grid."""


def _import_with_stand_in(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    if name in ("triton", "triton.language") and not fromlist:
        return _TRITON
    return __import__(name, globals, locals, fromlist or (), level)


def submodules_of(part: Any) -> Any:
    """megatron-core 0.17 and newer: return the submodules of a part of a layer spec, from whichever form it has.

    A ``ModuleSpec`` in 0.16. Experts are a ``partial`` of what builds them from 0.17 on, the whole MLP from 0.18 on.
    """
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


PATH_MODULES = ("pathlib", "pathlib._local")
"""Python 3.13 alone: pickles name the classes of paths by ``pathlib._local``; all others name ``pathlib``."""


READS_FOR_DATASETS = frozenset({"megatron.core.safe_globals"})
"""megatron-core 0.19 and newer: the module whose ``numpy.load`` its datasets call; older ones call their own."""


def common_tensor_state(state: tuple[object, ...]) -> tuple[object, ...]:
    """torch 2.15 and newer: return the part of a pickled ``TensorProperties`` that every version knows, 5 fields.

    The sixth, strides, makes older versions fail with "too many values to unpack"; 2.15 reads five as well.
    """
    return state[:5]


def clear_moe_losses(moe_utils: Any) -> None:
    """megatron-core 0.18 and newer: set to zero what was added up of auxiliary losses for a log.

    They are in a tracker of their own. The function that served until then is deprecated, to go in any release.
    """
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().clear()
    else:
        moe_utils.clear_aux_losses_tracker()


def bind_missing_gemm(moe_utils: Any) -> None:
    """megatron-core 0.16 alone: bind a name that its router reads, and that only TransformerEngine gives a value.

    moe_utils.py:1192 reads it, moe_utils.py:34 binds it.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
