"""``hetero doctor`` and ``scripts/test_gpu.sh`` as a user types them, on a machine without a GPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_the_checklist_of_this_host(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    said = capfd.readouterr().out
    assert code == int("PROBLEM" in said), said
    for line in ("operating system", "torch", "megatron-core", "/dev/shm", "network"):
        assert line in said
    assert said.rstrip().splitlines()[-1].split()[1].startswith(("ok", "warning", "problem"))


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_facts_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    (facts,) = json.loads(capfd.readouterr().out)["hosts"]
    assert facts["torch"]["version"] == torch.__version__


def test_a_plan_needs_its_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "plan.json"]) == 2
    assert capfd.readouterr().err.startswith("hetero: --plan has no effect in one process")


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
def test_the_gpu_script_says_what_is_missing(
    version: str, cuda: str | None, sees: bool | None, said: str, tmp_path: Path
) -> None:
    """Before it makes or installs anything. ``sees``: what is played in place of this host's torch."""
    bash = shutil.which("bash")
    assert bash is not None
    environment = os.environ | {"PYTHON": sys.executable}
    if sees is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(
            "from types import SimpleNamespace\n"
            f"__version__, version = {version!r}, SimpleNamespace(cuda={cuda!r})\n"
            f"cuda = SimpleNamespace(is_available=lambda: {sees})\n"
        )
        environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        [bash, "scripts/test_gpu.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert not (ROOT / ".venv-gpu").exists()
