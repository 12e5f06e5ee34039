"""A checkout that pip has not installed works: nothing asks the metadata of an installation for its own version."""

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero.doctor.findings import Diagnosis
from hetero.serialization import from_json
from hetero.version import VERSION
from tests.helpers.commands import ROOT, command_line

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A copy of this project's files, and a Python that has all that this one has except the project."""

    folder: Path
    python: Path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run it in the checkout, as somebody does who has only cloned it."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.python, *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=100
        )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("environment")
    sources = folder / "checkout"
    for name in ("hetero", "megatron"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pretrain_gpt.py", sources)
    venv.create(folder / "venv", with_pip=False)
    others = folder / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"megatron_hetero-|.*\.(pth|egg-link)$|__editable__", path.name):
            (others / path.name).symlink_to(path)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    (site / "others.pth").write_text(f"{others}\n", encoding="utf-8")
    return Checkout(folder=sources, python=folder / "venv" / "bin" / "python")


def test_it_is_not_installed(checkout: Checkout) -> None:
    done = checkout.run("-c", "import importlib.metadata as m; print(m.version('torch')); m.version('megatron-hetero')")
    assert done.stdout.startswith("2.")
    assert "PackageNotFoundError: No package metadata was found for megatron-hetero" in done.stderr


def test_commands_know_their_version(checkout: Checkout) -> None:
    done = checkout.run("-m", "hetero", "--version")
    assert (done.stdout, done.stderr) == (f"hetero {VERSION}\n", "")


@pytest.mark.slow
def test_the_doctor_knows_the_version(checkout: Checkout) -> None:
    done = checkout.run("-m", "hetero", "doctor", "--json")
    (facts,) = from_json(Diagnosis, done.stdout, source="stdout").hosts
    assert facts.packages["megatron-hetero"] == VERSION


@pytest.mark.slow
def test_it_trains(checkout: Checkout) -> None:
    done = checkout.run("pretrain_gpt.py", *command_line(micro_batch_size="1", train_iters="1"))
    assert done.returncode == 0, done.stderr
    assert "| lr 1.000e-02 |" in done.stdout
