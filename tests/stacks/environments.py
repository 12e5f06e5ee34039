"""Virtual environments, one for each combination of Python, torch and megatron-core."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from hetero.data.tried_versions import shipped_versions
from hetero.installed_versions import InstalledVersions
from tests.helpers.sources import ROOT

_VARIES = ("torch", "megatron-core", "setuptools")
"""What ``constraints.txt`` does not pin here; torch up to 2.11 wants setuptools below 82."""


class StackError(Exception):
    """An environment cannot be made or used; the message is one line."""


@dataclass(frozen=True, order=True)
class Stack:
    """Versions that are installed together; ``python`` is major and minor.

    without_triton: torch's dependency Triton is uninstalled, as builds of torch for CPUs do not have it.
    """

    python: str
    torch: str
    megatron_core: str
    without_triton: bool = False

    def __str__(self) -> str:
        versions = f"Python {self.python}, torch {self.torch}, megatron-core {self.megatron_core}"
        return f"{versions}, no Triton" if self.without_triton else versions

    @property
    def folder_name(self) -> str:
        name = f"python{self.python}-torch{self.torch}-core{self.megatron_core}"
        return f"{name}-no-triton" if self.without_triton else name


def possible_stacks(
    pythons: Sequence[str], torches: Sequence[str], cores: Sequence[str], *, without_triton: bool
) -> Iterator[Stack]:
    """Yield the combinations that are not known to break."""
    for python, torch, core in itertools.product(pythons, torches, cores):
        versions = InstalledVersions(python=python, torch=torch, megatron_core=core)
        if shipped_versions().judge(versions).kind != "known to break":
            yield Stack(python, torch, core, without_triton=without_triton)


def make_environment(stack: Stack, folder: Path) -> Path:
    """Make the environment of ``stack`` in ``folder``, unless it is complete, and return its Python.

    It has this project and its tests' packages as ``constraints.txt`` pins them, but for what varies. With ``uv`` on
    PATH that takes seconds; with pip a CUDA build of torch takes minutes and 5 GB for each environment.

    Raises:
        StackError: there is no such Python, or the installation fails.
    """
    environment = folder / stack.folder_name
    python, complete = environment / "bin" / "python", environment / "complete"
    if complete.exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)
    base = find_python(stack.python)
    environment.parent.mkdir(parents=True, exist_ok=True)
    constraints = folder / f"{stack.folder_name}.constraints.txt"
    constraints.write_text("\n".join(_constraints(stack)) + "\n", encoding="utf-8")
    uv = shutil.which("uv")
    if uv is not None:
        run_command(uv, "venv", "--quiet", "--seed", "--python", base, str(environment))
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        run_command(base, "-m", "venv", str(environment))
        install = [str(python), "-m", "pip", "install", "--quiet"]
    run_command(*install, "--constraint", str(constraints), "--editable", f"{ROOT}[test]")
    if stack.without_triton:
        run_command(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "triton")
    complete.touch()
    return python


def _constraints(stack: Stack) -> Iterator[str]:
    """Yield the lines of ``constraints.txt``, with the versions of ``stack`` for what varies."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#") or Requirement(line).name not in _VARIES:
            yield line
    yield f"torch=={stack.torch}"
    yield f"megatron-core=={stack.megatron_core}"


def find_python(version: str) -> str:
    """Return the path of a Python of ``version`` that runs: on PATH, or in the folders of pyenv and uv.

    Raises:
        StackError: there is none.
    """
    found = subprocess.run(
        ["bash", "-c", 'source scripts/environment.sh && find_python "$1"', "bash", version],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        raise StackError(f"found no Python {version} that runs on PATH, in pyenv's or in uv's folder; install one")
    return found.stdout.strip()


def run_module(python: Path, *arguments: str, timeout_s: float) -> str:
    """Run ``python -m ARGUMENTS`` in the root of this repository and return what it printed.

    Raises:
        StackError: it failed or took too long.
    """
    return run_command(str(python), "-m", *arguments, timeout_s=timeout_s)


def run_command(*command: str, timeout_s: float | None = None) -> str:
    """Run ``command`` in the root of this repository and return what it printed.

    Raises:
        StackError: it failed, with the line that names its error; or it took too long.
    """
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"{' '.join(command)}: took more than {timeout_s:g} s") from None
    if done.returncode != 0:
        raise StackError(error_line(done.stderr or done.stdout) or f"exit code {done.returncode}: {' '.join(command)}")
    return done.stdout


def error_line(output: str) -> str:
    """Return the line of ``output`` that names the error: the last one that begins at the margin, as in a traceback."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    at_margin = [line for line in lines if not line[0].isspace() and not line.startswith(("warning", "hint"))]
    return next(reversed(at_margin), "")
