"""The planner as ``pip install megatron-hetero`` brings it: without torch, megatron-core and all that extras bring."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.doctor.findings import Diagnosis
from hetero.extras import EXTRAS
from hetero.serialization import from_json
from tests.helpers.sailor_tables import write_tables

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "scripts/presets"
CLUSTER = PRESETS / "clusters/quickstart.yaml"

HIDES = """
import importlib.abc, json, runpy, sys

hidden, program, command_lines = sys.argv[1].split(","), sys.argv[2], json.loads(sys.argv[3])

class Hides(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(f"{each}.") for each in hidden):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
if program == "hetero":
    from hetero.cli import main
    sys.exit(max(main(command_line) for command_line in command_lines))
sys.argv = [program, *command_lines[0]]
runpy.run_path(program, run_name="__main__")
"""
"""Runs a program in a process in which some modules cannot be found; ``hetero`` with one command line after another."""


def run(program: str, *command_lines: Sequence[object]) -> "subprocess.CompletedProcess[str]":
    hidden = ",".join(module for modules in EXTRAS.values() for module in modules)
    words = json.dumps([[str(word) for word in words] for words in command_lines])
    return subprocess.run(
        [sys.executable, "-c", HIDES, hidden, program, words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_planner_works(tmp_path: Path) -> None:
    """Every command, with everything that it can write."""
    plan, report, trace, figure = (tmp_path / name for name in ("plan.json", "report.html", "trace.json", "memory.png"))
    write_tables(tmp_path)
    model = PRESETS / "models/gpt-200m.yaml"
    done = run(
        "hetero",
        ["plan", "--cluster", CLUSTER, "--model", model, "--global-batch-size", 32, "--time-limit", 3, "--out", plan],
        ["validate", plan, "--cluster", CLUSTER],
        ["show", plan, "--schedule", "--program"],
        ["simulate", plan, "--cluster", CLUSTER, "--trace", trace, "--report", report, "--figure", f"memory={figure}"],
        ["launch", plan],
        ["profile", "import", tmp_path, "--out", tmp_path / "imported"],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "planned in",
        f"ok, fits {CLUSTER}",
        "\n0F0 ",
        "\ncompute  0F0 ",
        "s per step",
        "--rdzv-conf node_rank=2",
        "links.json: ",
    ):
        assert said in done.stdout
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert "<svg" in report.read_text(encoding="utf-8")
    assert figure.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.rotates(every=6, turn=2)
def test_training_needs_no_extra_but_its_own() -> None:
    """A launch without agents, as the quick start is, imports nothing that other extras bring."""
    others = {module for extra in EXTRAS if extra != "train" for module in EXTRAS[extra]} - set(EXTRAS["train"])
    script = "import megatron.pretrain.training as t; raise SystemExit(0 if callable(t.pretrain) else 1)"
    hides = HIDES.partition("if program ==")[0] + script
    words = [sys.executable, "-c", hides, ",".join(sorted(others)), "", "[]"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NEEDS = "torch, megatron.core, safetensors, isal, which are not installed; run: pip install 'megatron-hetero[train]'\n"


def test_a_measurement_says_what_to_install() -> None:
    plan = PRESETS / "plans/quickstart.json"
    done = run("hetero", ["simulate", plan, "--cluster", CLUSTER, "--measure"])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hetero: --measure needs {NEEDS}")


def test_a_measurement_of_the_host_says_what_to_install() -> None:
    done = run("hetero", ["profile", "host"])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"hetero: hetero profile host needs {NEEDS}")


def test_the_doctor_says_what_to_install() -> None:
    """It looks at the host all the same; what is missing is a problem."""
    done = run("hetero/doctor/__main__.py", ["--json"])
    assert done.returncode == 1, done.stderr
    found = from_json(Diagnosis, done.stdout, source="stdout")
    assert found.hosts[0].torch is None
    (torch,) = [finding for finding in found.findings if finding.subject == "torch"]
    assert (torch.severity, torch.found) == ("problem", "not installed")
    assert "pip install" in torch.todo


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "pretrain_gpt.py",
        *sorted(f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py") if path.name != "sweep.py"),
    ],
)
def test_a_program_that_trains_says_what_to_install(program: str) -> None:
    done = run(program, ["--help"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hetero: {Path(program).name} needs {NEEDS}"
