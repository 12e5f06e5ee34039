"""Every difference among the supported versions, made by hand: it holds whichever of them is installed."""

import importlib
import pickle
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.runtime.version_differences import (
    PATH_MODULES,
    bind_missing_gemm,
    clear_moe_losses,
    define_kernels_without_triton,
    submodules_of,
)

KERNELS = """
import os.path
import triton
import triton.language as tl
from {package}.guarded import HAS_TRITON

@triton.jit
def copy(source, BLOCK: tl.constexpr):
    return tl.load(source)
"""
GUARDED = """
try:
    import triton
    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a module of kernels and one that asks whether there is Triton, where there is none."""
    name = "package_of_kernels"
    folder = tmp_path / name
    folder.mkdir()
    for file, text in (("__init__", ""), ("kernels", KERNELS.format(package=name)), ("guarded", GUARDED)):
        (folder / f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for hidden in modules_of("triton"):
        monkeypatch.delitem(sys.modules, hidden)
    sys.meta_path.insert(0, OnlyTritonIn(tmp_path))
    yield name
    for each in [*modules_of(name), *modules_of("triton")]:
        del sys.modules[each]


def modules_of(package: str) -> list[str]:
    return [each for each in sys.modules if each.partition(".")[0] == package]


class OnlyTritonIn:
    """Finds no Triton but that in ``folder``, where another is installed as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "triton":
            return None
        if spec := PathFinder.find_spec(fullname, path or [str(self.folder)]):
            return spec
        raise ModuleNotFoundError(fullname, name=fullname)


class TestKernelsWithoutTriton:
    def test_without_the_stand_in_they_cannot_be_imported(self, package: str) -> None:
        with pytest.raises(ModuleNotFoundError, match="triton"):
            importlib.import_module(f"{package}.kernels")

    def test_with_it_they_can(self, package: str) -> None:
        define_kernels_without_triton(frozenset({f"{package}.kernels"}))
        kernels = importlib.import_module(f"{package}.kernels")
        assert kernels.os.path is __import__("os").path, "all else is imported as ever"
        with pytest.raises(TypeError):
            kernels.copy[(1,)](None)

    def test_all_others_hear_that_there_is_no_triton(self, package: str) -> None:
        """Those that the module itself imports as well."""
        define_kernels_without_triton(frozenset({f"{package}.kernels"}))
        assert not importlib.import_module(f"{package}.kernels").HAS_TRITON
        assert "triton" not in sys.modules

    def test_it_is_there_once(self, package: str) -> None:
        before = len(sys.meta_path)
        for _ in range(2):
            define_kernels_without_triton(frozenset({f"{package}.kernels"}))
        assert len(sys.meta_path) == before + 1

    def test_an_installed_triton_is_taken(self, package: str, tmp_path: Path) -> None:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text("jit = str")
        (tmp_path / "triton" / "language.py").write_text("constexpr = int")
        define_kernels_without_triton(frozenset({f"{package}.kernels"}))
        kernels = importlib.import_module(f"{package}.kernels")
        assert kernels.triton is sys.modules["triton"]
        assert isinstance(kernels.copy, str)
        assert kernels.HAS_TRITON

    @pytest.mark.parametrize("file", ["__pycache__/language.cpython-312.pyc", "__init__.py"])
    def test_a_triton_that_cannot_be_imported_is_none(self, file: str, package: str, tmp_path: Path) -> None:
        """What an uninstallation left of it, or one whose library was built for another system."""
        path = tmp_path / "triton" / file
        path.parent.mkdir(parents=True)
        path.write_text("raise ImportError('libtriton.so: cannot open shared object file')")
        define_kernels_without_triton(frozenset({f"{package}.kernels"}))
        with pytest.raises(TypeError):
            importlib.import_module(f"{package}.kernels").copy[(1,)](None)


def test_submodules_of_either_form() -> None:
    linear = SimpleNamespace(linear_fc1=None, linear_fc2=None)
    assert submodules_of(SimpleNamespace(submodules=linear)) is linear
    assert submodules_of(partial(dict, submodules=linear)) is linear


def test_both_names_of_a_path() -> None:
    """What this Python calls it is one of them, in every protocol."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert any(each.encode() in pickle.dumps(Path("a"), protocol) for each in PATH_MODULES)


def test_auxiliary_losses_are_cleared_where_they_are() -> None:
    """The deprecated function is not called where there is a tracker: it may be gone."""
    cleared: list[str] = []
    tracker = SimpleNamespace(clear=lambda: cleared.append("tracker"))
    clear_moe_losses(SimpleNamespace(get_moe_metrics_tracker=lambda: tracker))
    clear_moe_losses(SimpleNamespace(clear_aux_losses_tracker=lambda: cleared.append("function")))
    assert cleared == ["tracker", "function"]


def test_a_missing_gemm_is_bound_and_another_kept() -> None:
    missing, there = SimpleNamespace(), SimpleNamespace(te_general_gemm=max)
    for moe_utils in (missing, there):
        bind_missing_gemm(moe_utils)
    assert (missing.te_general_gemm, there.te_general_gemm) == (None, max)
