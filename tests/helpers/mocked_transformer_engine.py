"""TransformerEngine's own Python on a CPU: its wheel as it is, with the CUDA extension behind it played by torch.

``pip`` brings the wheel ``transformer_engine``, which is the Python alone (0.7 MB in 2.11.0, 1.2 MB in 2.20.2), into a
folder of the environment that no other process imports from. :func:`install` makes it importable in this process for
good, so it belongs into a process of its own (:mod:`tests.helpers.transformer_engine_ranks`), and has to come before
the first import of megatron-core.

What is played: matrix products, norms and their backwards (``transformer_engine_torch``), and the choice among
attention kernels, all in the precision they are given, float64 included. What is TransformerEngine's: modules,
autograd functions, sharding and gathering of sequences, biases, delayed weights' gradients, names and shapes.
"""

import contextlib
import importlib
import importlib.machinery
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from enum import IntEnum
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F

from tests.helpers.captured_graphs import no_graph_is_captured

NEWEST = "2.20.2"
"""Newest version that the tests were run with."""

NEWEST_ALLOWED = {"0.16": "2.11.0"}
"""Newest version, by megatron-core's release; 0.16 asks for ``>=2.9,<2.12``, later ones have no upper bound."""

STUBS = (
    "triton",
    "triton.language",
    "triton.language.core",
    "triton.language.standard",
    "onnxscript",
    "onnxscript.ir",
    "onnx",
    "onnx_ir",
    "einops",
)
"""Packages that are imported and, for what is done here, not used."""


def default_version() -> str:
    """Return the version that the tests mock: the newest that the installed megatron-core allows."""
    release = ".".join(metadata.version("megatron-core").split(".")[:2])
    return NEWEST_ALLOWED.get(release, NEWEST)


def fetch(version: str) -> Path:
    """Return the folder with the wheel's files; pip is asked once for each version."""
    folder = Path(sys.prefix) / f"transformer_engine-{version}"
    if not (folder / "transformer_engine").is_dir():
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--target"]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, str(folder), f"transformer_engine=={version}"],
            check=True,
            timeout=100,
        )
    return folder


def install(version: str) -> None:
    """Make ``import transformer_engine`` work in this process, on a machine that says it has CUDA."""
    # Without this its __init__ loads CUDA's libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    wheel = fetch(version)
    sys.path.insert(0, str(wheel))

    # Before triton is played.
    import torch._dynamo
    import torch._inductor.compile_fx

    sys.modules["transformer_engine_torch"] = _extension(wheel)
    for name in STUBS:
        sys.modules[name] = _Stub(name)
        package, _, child = name.rpartition(".")
        if package:
            setattr(sys.modules[package], child, sys.modules[name])
    sys.modules["triton"].__version__ = "3.7.0"  # type: ignore[attr-defined]
    for decorator in ("jit", "autotune", "heuristics"):
        setattr(sys.modules["triton"], decorator, _undecorated)
    device = types.SimpleNamespace(major=9, minor=0, multi_processor_count=108, name="H100", total_memory=80 << 30)
    for name, stand_in in {
        "Stream": MagicMock(),
        "Event": MagicMock(),
        "get_device_properties": lambda *_: device,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (device.major, device.minor),
    }.items():
        setattr(torch.cuda, name, stand_in)

    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    no_graph_is_captured().start()

    from hetero.runtime import cpu_backend

    is_available = torch.cuda.is_available
    # The package loads its extension from a file, unless told otherwise between these two imports.
    sys.modules["transformer_engine.pytorch"] = None  # type: ignore[assignment]
    common = importlib.import_module("transformer_engine.common")
    del sys.modules["transformer_engine.pytorch"]
    vars(common)["load_framework_extension"] = lambda _: None
    te = importlib.import_module("transformer_engine.pytorch")

    cpu_backend.install()
    torch.cuda.is_available = lambda: True
    assert not is_available(), "this is for machines without CUDA"

    constants = importlib.import_module("transformer_engine.pytorch.constants")
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    # Nothing reads it. From 2.16 on, the members have to be those of the extension, which knows no float64.
    constants.TE_DType[torch.float64] = constants.TE_DType[torch.float32]
    te.DotProductAttention.forward = _attention
    base.TransformerEngineBaseModule.prepare_forward = _on_any_device(base.TransformerEngineBaseModule.prepare_forward)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.pytorch.") and hasattr(module, "get_dummy_wgrad"):
            vars(module)["get_dummy_wgrad"] = get_dummy_wgrad


class _Stub(types.ModuleType):
    """A module in which every name is a mock."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _DType(IntEnum):
    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2, kFloat4E2M1 = range(8)


def _undecorated(*args: Any, **_: Any) -> Any:
    return args[0] if args and callable(args[0]) else (lambda function: function)


def _fused_attention_backends(wheel: Path) -> type[IntEnum]:
    """Return those that the wheel's Python names: newer versions refuse an extension with others."""
    source = (wheel / "transformer_engine" / "pytorch" / "cpp_extensions" / "fused_attn.py").read_text()
    names = sorted(set(re.findall(r"NVTE_Fused_Attn_Backend\.(NVTE_\w+)", source)))
    return cast(type[IntEnum], IntEnum("NVTE_Fused_Attn_Backend", names))


def _extension(wheel: Path) -> types.ModuleType:
    extension = _Stub("transformer_engine_torch")
    extension.DType = _DType  # type: ignore[attr-defined]
    extension.NVTE_Fused_Attn_Backend = _fused_attention_backends(wheel)  # type: ignore[attr-defined]
    extension.CommGemmOverlapRole = type("CommGemmOverlapRole", (), {})  # type: ignore[attr-defined]
    extension.get_cudnn_version = lambda *_: 91000  # type: ignore[attr-defined]
    extension.get_num_cublas_streams = lambda: 4  # type: ignore[attr-defined]
    for function in (
        generic_gemm,
        te_general_grouped_gemm,
        layernorm_fwd,
        layernorm_bwd,
        rmsnorm_fwd,
        rmsnorm_bwd,
    ):
        setattr(extension, function.__name__, function)
    return extension


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What autograd gets in place of a gradient that is in ``main_grad`` already; nobody is to read it."""
    return torch.full(shape, 0.0 if zero else float("nan"), dtype=dtype)


def generic_gemm(  # type: ignore[no-untyped-def]
    A,
    transa,
    B,
    transb,
    out,
    quantizer,
    out_dtype,
    bias,
    bias_dtype,
    gelu,
    gelu_in,
    grad,
    workspace,
    workspace_size,
    accumulate,
    use_split_accumulator,
    **_,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """op(B) op(A), as gemm.py calls it: the forward plus a bias, or with ``grad`` the gradient of a bias beside it."""
    assert quantizer is None
    assert not gelu
    rows = B.flatten(0, -2) if B.dim() > 2 else B
    columns = A.flatten(0, -2) if A.dim() > 2 else A
    found = (rows.t() if transb else rows) @ (columns.t() if transa else columns)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = rows.sum(0)
    elif bias is not None and bias.numel():
        found = found + bias
    if not transb:
        found = found.view(*B.shape[:-1], found.shape[-1])
    if out is None:
        return found, bias_gradient, None, None
    with torch.no_grad():
        out.copy_(out + found if accumulate else found)
    return out, bias_gradient, None, None


def te_general_grouped_gemm(  # type: ignore[no-untyped-def]
    A,
    transa,
    B,
    transb,
    out,
    out_dtype,
    m_splits,
    bias,
    bias_dtype,
    single_output,
    gelu_input,
    grad,
    workspaces,
    workspace_size,
    accumulate,
    *_,
):
    """One product per expert; with ``single_output`` one behind the other."""
    first = 0
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        into = out[0][first : first + m_splits[i]] if single_output else out[i]
        first += m_splits[i]
        if a.numel() and b.numel():
            generic_gemm(a, transa, b, transb, into, *(None,) * 3, None, False, None, grad, None, 0, accumulate, False)
        elif not accumulate:
            into.zero_()
    return bias


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, margin, zero_centered):  # type: ignore[no-untyped-def]
    mean, variance = x.mean(-1), x.var(-1, unbiased=False)
    found = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return found, mean, (variance + eps).rsqrt()


def layernorm_bwd(dz, x, mean, rsigma, weight, margin, zero_centered):  # type: ignore[no-untyped-def]
    normal = (x - mean[:, None]) * rsigma[:, None]
    scaled = dz * weight
    inner = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    return inner * rsigma[:, None], (dz * normal).sum(0), dz.sum(0)


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered):  # type: ignore[no-untyped-def]
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    return x * rsigma[:, None] * weight, None, rsigma


def rmsnorm_bwd(dz, x, rsigma, weight, margin, zero_centered):  # type: ignore[no-untyped-def]
    normal, scaled = x * rsigma[:, None], dz * weight
    return (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None], (dz * normal).sum(0)


def _attention(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """In place of ``DotProductAttention.forward`` (sbhd), whose Python chooses among kernels that are not here."""
    assert attention_mask is None
    assert options["attn_mask_type"] == "causal", options
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return found.permute(2, 0, 1, 3).flatten(2)


def _on_any_device(prepare_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Its assertion that the input is on CUDA has no other effect."""

    class OnCuda:
        """The input, as far as ``prepare_forward`` looks at it."""

        is_cuda = True

        def __init__(self, tensor: Any) -> None:
            self._tensor = tensor

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tensor, name)

        def contiguous(self) -> Any:
            return OnCuda(self._tensor.contiguous())

    @contextlib.contextmanager
    def prepare(self: Any, inp: Any, *args: Any, **options: Any) -> Any:
        with prepare_forward(self, OnCuda(inp), *args, **options) as prepared:
            yield prepared._tensor

    def prepare_without_context(self: Any, inp: Any, *args: Any, **options: Any) -> Any:
        return prepare_forward(self, OnCuda(inp), *args, **options)._tensor

    # A context manager until 2.11, later a function with ``end_forward`` as its counterpart.
    is_context = inspect.isgeneratorfunction(inspect.unwrap(prepare_forward))
    return prepare if is_context else prepare_without_context


if __name__ == "__main__":
    fetch(default_version())
