"""The wheels of megatron-core and of this project share a folder and no file: either is installed without the other."""

import base64
import csv
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero.version import VERSION
from tests.helpers.commands import command_line
from tests.helpers.lanes import NEWEST_PYTHON, pinned_versions
from tests.helpers.megatron_core_wheels import VERSIONS, fetch
from tests.helpers.sources import ROOT

OURS = ("megatron-core", "megatron-hetero")
"""Distributions that a new environment does not take from the one that runs the tests."""

needs_newest_python = pytest.mark.skipif(
    sys.version_info < NEWEST_PYTHON, reason="megatron-core 0.17 and newer need Python 3.12: the second lane runs this"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's, built from a copy, since building leaves files in the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("hetero", "megatron"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    [built] = (folder / "dist").glob("*.whl")
    return built


def pip(*words: str, python: Path | None = None) -> str:
    """Run this environment's pip, on another one if ``python`` is its."""
    into = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "pip", *into, "--quiet", "--disable-pip-version-check", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_our_wheel_has_the_packages_and_their_data(wheel: Path) -> None:
    files = files_of(wheel)
    assert wheel.name.startswith(f"megatron_hetero-{VERSION}-")
    assert {"megatron/pretrain/training.py", "hetero/cli.py", "hetero/py.typed"} <= files
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {"hetero", "megatron"}
    sources = {
        str(path.relative_to(ROOT)) for top in ("hetero", "megatron/pretrain") for path in (ROOT / top).rglob("*.py")
    }
    assert {name for name in files if name.endswith(".py")} == sources


@pytest.mark.parametrize("version", VERSIONS)
def test_no_file_of_ours_is_in_the_wheel_of_megatron_core(version: str, wheel: Path) -> None:
    """Nor below a folder in which it has modules, but for the namespace ``megatron`` itself."""
    theirs, ours = files_of(fetch(version)), files_of(wheel)
    assert "megatron/core/__init__.py" in theirs
    assert ours & theirs == set()
    packages = [
        {"/".join(name.split("/")[:2]) for name in names if name.startswith("megatron/")} for names in (ours, theirs)
    ]
    assert packages[0] & packages[1] == set()
    assert "megatron/__init__.py" not in ours | theirs


def test_these_are_the_versions_that_setup_accepts() -> None:
    """And the constraints take the oldest and the newest of them."""
    accepted = next(
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("megatron-hetero") or ())
        if requirement.name == "megatron-core"
    ).specifier
    assert [version for version in VERSIONS if version not in accepted] == []
    assert "0.16.0" not in accepted
    assert "0.20.0" not in accepted
    assert pinned_versions("3.11")["megatron-core"] == VERSIONS[0]
    assert {pinned_versions(python)["megatron-core"] for python in ("3.12", "3.13")} == {VERSIONS[-1]}


class Environment:
    """A new virtual environment with all that this one has, except megatron-core and this project."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self._site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        others = folder / "others"
        others.mkdir()
        left_out = re.compile(r"megatron$|megatron_(core|hetero)-|hetero$|.*\.(pth|egg-link)$|__editable__")
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not left_out.match(path.name):
                (others / path.name).symlink_to(path)
        (self._site / "others.pth").write_text(f"{others}\n", encoding="utf-8")
        shutil.copy(ROOT / "pretrain_gpt.py", folder)
        self._folder = folder

    def install(self, wheel: Path) -> None:
        pip("install", "--no-index", "--no-deps", "--upgrade", str(wheel), python=self.python)

    def uninstall(self, name: str) -> None:
        pip("uninstall", "--yes", name, python=self.python)

    def damaged_files(self) -> dict[str, list[str]]:
        """Files of the installed distributions that are missing, or not as their wheel recorded them."""
        return {
            distribution.name: [
                name for name, digest, _ in _recorded(distribution) if digest and self._digest(name) != digest
            ]
            for distribution in importlib.metadata.distributions(path=[str(self._site)])
        }

    def _digest(self, name: str) -> str | None:
        path = self._site / name
        if not path.is_file():
            return None
        return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run its Python in a folder without sources."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), *words],
            cwd=self._folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def train_one_step(self) -> subprocess.CompletedProcess[str]:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
        flags = command_line(train_iters="1", micro_batch_size="1")
        return self.run(*launcher, "pretrain_gpt.py", *flags)


def _recorded(distribution: importlib.metadata.Distribution) -> list[list[str]]:
    """Name, digest and size of each file. Python 3.12 leaves missing ones out of ``distribution.files``."""
    return list(csv.reader((distribution.read_text("RECORD") or "").splitlines()))


def assert_both_work(environment: Environment) -> None:
    assert environment.damaged_files() == {name: [] for name in OURS}
    trained = environment.train_one_step()
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert re.search(r"^step +1/1 \| loss ", trained.stdout, re.MULTILINE), trained.stdout


@needs_newest_python
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ours_goes_and_megatron_core_stays(tmp_path: Path, wheel: Path) -> None:
    """megatron-core before ours, upgraded under it, and ours uninstalled."""
    environment = Environment(tmp_path)
    environment.install(fetch("0.18.2"))
    environment.install(wheel)
    assert environment.damaged_files() == {name: [] for name in OURS}
    environment.install(fetch("0.19.2"))
    assert_both_work(environment)
    environment.uninstall("megatron-hetero")
    assert environment.damaged_files() == {"megatron-core": []}
    found = environment.run(
        "-c", "import importlib.util as i; print(*map(i.find_spec, ['megatron.training', 'hetero']))"
    )
    assert re.search(r"megatron/training.* None$", found.stdout.strip()), found.stdout + found.stderr


@needs_newest_python
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_megatron_core_goes_and_ours_stays(tmp_path: Path, wheel: Path) -> None:
    """Ours before megatron-core, which is uninstalled: planning works, training says what is missing."""
    environment = Environment(tmp_path)
    environment.install(wheel)
    environment.install(fetch("0.19.2"))
    assert_both_work(environment)
    environment.uninstall("megatron-core")
    assert environment.damaged_files() == {"megatron-hetero": []}
    assert environment.run("-m", "hetero", "devices").returncode == 0
    refused = environment.train_one_step()
    assert refused.returncode != 0
    assert "needs megatron.core, which is not installed" in refused.stderr, refused.stderr
