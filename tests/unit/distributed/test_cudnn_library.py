"""torch's own cuDNN is loaded whole, by its path, before TransformerEngine can load another."""

import ctypes
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.distributed import cudnn_library, runtime_versions
from hetero.distributed.cudnn_library import PARTS, CudnnVersions, load_cudnn, loaded_libraries
from hetero.distributed.runtime_versions import cudnn_note, cudnn_versions, cudnn_warnings
from hetero.doctor.host_checks import check_cudnn
from hetero.runtime import cpu_backend
from tests.unit.doctor.samples import A100, host, torch_of

ROOT = Path(__file__).parents[3]


def line(path: object) -> str:
    return f"7f00-7f01 r-xp 00000000 fd:01 42     {path}\n"


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is loaded, by file and mode, where the kernel says that torch has loaded a small library of cuDNN 9."""
    for name in ("libcudnn.so.9", *(f"libcudnn_{part}.so.9" for part in PARTS if part != "adv")):
        (tmp_path / name).touch()
    memory_map = tmp_path / "maps"
    memory_map.write_text(line("/torch/lib/libtorch_cuda.so") + 2 * line(tmp_path / "libcudnn.so.9") + line("[stack]"))
    monkeypatch.setattr(cudnn_library, "_MEMORY_MAP", memory_map)
    loaded: list[tuple[str, int]] = []

    def load(path: str, mode: int = ctypes.DEFAULT_MODE) -> None:
        loaded.append((Path(path).name, mode))

    monkeypatch.setattr(ctypes, "CDLL", load)
    return loaded


def test_all_parts_are_loaded_in_order_and_the_library_for_all(loads: list[tuple[str, int]], tmp_path: Path) -> None:
    """A part of another version of cuDNN may be missing."""
    assert loaded_libraries() == [tmp_path / "libcudnn.so.9"]
    load_cudnn()
    assert loads == [
        *((f"libcudnn_{part}.so.9", ctypes.DEFAULT_MODE) for part in PARTS if part != "adv"),
        ("libcudnn.so.9", ctypes.RTLD_GLOBAL),
    ]


def test_a_path_may_contain_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of an environment below ``My projects`` does; what was deleted is none that can be loaded."""
    memory_map = tmp_path / "maps"
    path = Path("/home/My projects/lib/libcudnn.so.9")
    memory_map.write_text(line(path) + line("/tmp/libcudnn.so.9 (deleted)"))
    monkeypatch.setattr(cudnn_library, "_MEMORY_MAP", memory_map)
    assert loaded_libraries() == [path]


def test_a_part_that_cannot_be_loaded_does_not_end_the_program(
    loads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str, mode: int = ctypes.DEFAULT_MODE) -> None:
        loads.append((Path(path).name, mode))
        raise OSError("libcublas.so.13: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    load_cudnn()
    assert len(loads) == 1


def test_no_libraries_are_known_where_the_kernel_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_library, "_MEMORY_MAP", tmp_path / "maps")
    assert loaded_libraries() == []


@pytest.mark.parametrize("others", ["/usr/lib/libcudnn.so.9", None])
def test_nothing_is_loaded_without_cudnn_or_too_late(
    others: str | None, loads: list[tuple[str, int]], tmp_path: Path
) -> None:
    memory_map = tmp_path / "maps"
    memory_map.write_text("" if others is None else memory_map.read_text() + line(others))
    load_cudnn()
    assert loads == []


def test_entry_points_load_it_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what they call before megatron-core is imported."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_backend, "load_cudnn", lambda: calls.append("cuDNN"))
    cpu_backend.install()
    assert calls == ["cuDNN"]


@pytest.mark.parametrize(
    ("loaded", "fits"), [("9.19.0", True), ("9.20.1", True), ("9.14.0", False), ("10.20.0", False)]
)
def test_another_cudnn_fits_if_it_is_no_older(loaded: str, fits: bool) -> None:
    assert CudnnVersions(loaded=loaded, built="9.19.0").fit == fits


def play_cudnn(monkeypatch: pytest.MonkeyPatch, loaded: tuple[int, int, int]) -> None:
    """Have a torch that was built for CUDA 13 with cuDNN 9.19, and runs on another one."""
    played = SimpleNamespace(is_cuda=True, getRuntimeVersion=lambda: loaded, getCompileVersion=lambda: (9, 19, 0))
    monkeypatch.setattr(runtime_versions, "_cudnn", played)
    monkeypatch.setattr(runtime_versions, "loaded_libraries", lambda: [Path("/usr/lib/libcudnn.so.9")] * 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_cudnn_that_does_not_fit_is_reported_and_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    play_cudnn(monkeypatch, (9, 14, 0))
    monkeypatch.setattr(runtime_versions, "loaded_nccl_version", lambda: "2.30.7")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    note = (
        "cuDNN 9.14.0, torch was built with 9.19.0: /usr/lib; leave other versions out of LD_PRELOAD and run: "
        "pip install --no-deps 'nvidia-cudnn-cu13==9.19.*'"
    )
    assert cudnn_note(cudnn_versions()) == note
    wrong = runtime_versions.runtime_versions(torch.device("cuda", 0))
    right = dataclasses.replace(wrong, cudnn_note="")
    assert cudnn_warnings([right, wrong, wrong]) == [f"ranks 1-2: {note}"]
    assert runtime_versions.runtime_versions(torch.device("cpu")).cudnn_note == ""
    (found,) = check_cudnn(host(torch=torch_of(A100, cudnn=cudnn_versions())))
    assert (found.severity, found.found) == ("problem", "9.14.0, torch was built with 9.19.0, from /usr/lib")
    assert found.todo.endswith("pip install --no-deps 'nvidia-cudnn-cu13==9.19.*'")


def test_a_cudnn_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    play_cudnn(monkeypatch, (9, 19, 0))
    assert cudnn_note(cudnn_versions()) == ""
    (found,) = check_cudnn(host(torch=torch_of(A100, cudnn=cudnn_versions())))
    assert (found.severity, found.found) == ("ok", "9.19.0, from /usr/lib")


LOAD_ANOTHER = """
import ctypes, sys, torch
torch.cuda.is_available = lambda: True
if sys.argv[2] == "as-an-entry-point":
    from hetero.runtime import cpu_backend
    cpu_backend.install()
# As TransformerEngine does.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).cudnnGetVersion()
from hetero.distributed.cudnn_library import loaded_libraries
from hetero.distributed.runtime_versions import cudnn_versions
cudnn_versions()
print(*{path.parent for path in loaded_libraries() if "graph" in path.name})
"""


@pytest.mark.slow
@pytest.mark.skipif(cudnn_versions() is None, reason="this torch is built without cuDNN")
@pytest.mark.parametrize("where", ["by-path", "on-library-path"])
def test_torch_runs_on_its_own_cudnn_where_another_is_loaded(where: str, tmp_path: Path) -> None:
    """Without the first call of entry points torch would run on the other one, here a copy of its own."""
    (own,) = {path.parent for path in loaded_libraries() if path.name.startswith("libcudnn.so")}
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9"):
        shutil.copy(own / name, tmp_path)
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(ROOT)}
    if where == "on-library-path":
        environment["LD_LIBRARY_PATH"] = str(tmp_path)

    def folder_of_graph(how: str) -> Path:
        command = [sys.executable, "-c", LOAD_ANOTHER, str(tmp_path / "libcudnn.so.9"), how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    assert folder_of_graph("without") == tmp_path
    assert folder_of_graph("as-an-entry-point") == own
