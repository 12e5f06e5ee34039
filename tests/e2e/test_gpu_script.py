"""``scripts/test_gpu.sh`` as a user types it, on a machine without a GPU: what it refuses, and a rehearsal."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.gpu_stages.stages import list_stages
from tests.gpu_stages.target import Target
from tests.helpers.sources import ROOT

CARRIED = ("hetero", "megatron", "scripts", "tests", "tools")
"""Folders that the script and its stages use."""


def run_script(
    *arguments: str, checkout: Path = ROOT, typed_in: Path | None = None, timeout_s: float = 60, **variables: str
) -> "subprocess.CompletedProcess[str]":
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, checkout / "scripts/test_gpu.sh", *arguments],
        cwd=typed_in or checkout,
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def play_torch(folder: Path, *, version: str, cuda: str | None, sees: bool) -> str:
    """Write a package that says what a torch says of its version and its devices, and return the folder of it."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        f"__version__, version = {version!r}, SimpleNamespace(cuda={cuda!r})\n"
        f"cuda = SimpleNamespace(is_available=lambda: {sees})\n"
    )
    return str(folder)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run the tests of the GPU")
@pytest.mark.parametrize(
    ("version", "cuda", "sees", "said"),
    [
        (torch.__version__, None, None, f"torch {torch.__version__} sees no GPU"),
        ("2.9.1+cu130", "13.0", True, "torch 2.9.1+cu130 is too old, this project needs 2.10 or newer"),
        ("2.13.0+cu130", "13.0", False, "torch 2.13.0+cu130 sees no GPU"),
        ("2.13.0+rocm7.0", None, True, "torch 2.13.0+rocm7.0 sees no GPU"),
    ],
    ids=["this one", "too old", "no driver", "ROCm"],
)
def test_what_is_missing_is_said_before_anything_is_made(
    version: str, cuda: str | None, sees: bool | None, said: str, tmp_path: Path
) -> None:
    """``sees``: what is played in place of this host's torch."""
    venv = tmp_path / "venv"
    played = (
        {} if sees is None else {"PYTHONPATH": play_torch(tmp_path / "played", version=version, cuda=cuda, sees=sees)}
    )
    done = run_script(VENV=str(venv), **played)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert not venv.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stages", "doctor", "benhc"), "scripts: --stages benhc: no such stage; there are doctor, shared-device, "),
        (
            ("--offline", "no/such/folder"),
            "scripts: --offline no/such/folder: there is no such folder; --pack makes one",
        ),
        (("--fats",), "unrecognized arguments: --fats"),
    ],
    ids=["stage", "folder", "option"],
)
def test_a_mistake_is_said_before_anything_is_made(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    played = play_torch(tmp_path / "played", version="2.13.0+cu130", cuda="13.0", sees=True)
    done = run_script(*arguments, VENV=str(tmp_path / "venv"), PYTHONPATH=played)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert not (tmp_path / "venv").exists()


def make_wheel(folder: Path, tag: str = "py3-none-any") -> None:
    """Write a wheel with one module, ``came_from_the_folder``, for the Python that ``tag`` names."""
    name = "came_from_the_folder"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_wheels_for_another_python_are_refused(tmp_path: Path) -> None:
    played = play_torch(tmp_path / "played", version="2.13.0+cu130", cuda="13.0", sees=True)
    make_wheel(tmp_path / "wheels", tag="cp310-cp310-any")
    done = run_script("--offline", str(tmp_path / "wheels"), VENV=str(tmp_path / "venv"), PYTHONPATH=played)
    assert done.returncode == 2, done.stdout
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "cp310-cp310-any.whl is not a supported wheel" in done.stderr
    assert done.stderr.strip().endswith(f"fill an empty folder by --pack FOLDER --for-python {wanted}")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the script uses, as on a machine that got them and nothing else."""
    copy = tmp_path / "a checkout"
    copy.mkdir()
    for folder in CARRIED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "constraints.txt", "README.md", "pretrain_gpt.py"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.rotates(every=3, turn=2)
@pytest.mark.skipif(torch.cuda.is_available(), reason="its call of CUDA would succeed")
def test_a_machine_without_a_gpu_gets_to_the_first_call_of_cuda(checkout: Path, tmp_path: Path) -> None:
    """This host's torch says that it was built for CUDA, as the one from PyPI is."""
    played = tmp_path / "played"
    played.mkdir()
    (played / "sitecustomize.py").write_text("import torch\n\ntorch.version.cuda = '13.0'\n")
    make_wheel(tmp_path / "wheels")
    out = tmp_path / "out"
    done = run_script(
        *("--offline", str(tmp_path / "wheels"), "--out", str(out)),
        checkout=checkout,
        timeout_s=550,
        VENV=str(tmp_path / "venv"),
        PYTHONPATH=str(played),
    )
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(
        "scripts: everything is installed, and the first call of CUDA fails (Torch not compiled with "
    )
    assert said.endswith("; run this where there is a GPU, or with DEVICE=cpu to rehearse")
    assert not out.exists()


PARTS: dict[str, tuple[str, ...]] = {
    "two ranks": ("shared-device", "two-ranks", "tests-groups"),
    "profile": ("profile", "wide-local", "wide-engine", "tests-overlap"),
    "small trainings": ("ramp-up", "precision", "tests-one-gpu"),
    "experts": ("experts", "tests-offload", "tests-ranks", "tests-half"),
    "steps": ("bench-local", "bench-engine", "steps", "tests-tools"),
    "what has run": ("tests-failures", "tests-ranks-seen", "tests-half-seen", "tests-hot-loop"),
}
"""Stages that a run of the suite rehearses, in turns. A stage takes 5 s of a core, one of several ranks up to 30."""


def test_every_stage_is_rehearsed() -> None:
    stages = [stage.name for stage in list_stages(Target(device="cpu"), "out")]
    assert sorted(("doctor", *itertools.chain(*PARTS.values()))) == sorted(stages)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.rotates("parts")) for part in PARTS])
def test_a_rehearsal(part: str, checkout: Path, tmp_path: Path) -> None:
    """From a folder of wheels to a report, on a CPU. Limits are long: a busy machine is no failure.

    The command is typed outside the checkout.
    """
    names = ("doctor", *PARTS[part])
    make_wheel(tmp_path / "my wheels")
    out, venv = tmp_path / "out", tmp_path / "venv"
    options = ("--out", "out", "--together", "2", "--limit-scale", "10", "--stages", *names)
    done = run_script(
        *("--offline", "my wheels", *options),
        checkout=checkout,
        typed_in=tmp_path,
        timeout_s=850,
        VENV="venv",
        DEVICE="cpu",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    where = subprocess.run(
        [venv / "bin/python", "-c", "import came_from_the_folder, hetero; print(hetero.__path__[0])"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip() == str(checkout / "hetero")
    results = {each["name"]: each for each in json.loads((out / "results.json").read_text())}
    assert set(results) == set(names)
    not_run = {name for name, each in results.items() if each["outcome"] == "not run"}
    assert not_run == {name for name in names if name.endswith("-engine")}
    assert {each["outcome"] for name, each in results.items() if name not in not_run} == {"passed"}
    report = (out / "report.md").read_text()
    assert report in done.stdout
    said = {
        "ramp-up": "| ramp-up | 1 | 4 | ",
        "two-ranks": "pp2: losses within ",
        "wide-local": "predicted by profile: ",
        "tests-one-gpu": " skipped",  # tests that need CUDA
        "bench-local": "memory MiB",
    }
    for name in said.keys() & set(names):
        assert said[name] in report
