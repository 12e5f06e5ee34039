"""The scripts of ``examples/`` run as their first lines say."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.serialization import load

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def command_of(path: Path) -> list[str]:
    """The command in an example's docstring, with this interpreter and without what may be left out."""
    (line,) = re.findall(rf"^    (.* examples/{path.name})", path.read_text(encoding="utf-8"), re.MULTILINE)
    program, *words = shlex.split(line)
    return [*{"python": [sys.executable], "torchrun": TORCHRUN}[program], *words]


def printed(name: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*command_of(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_cluster_is_planned(tmp_path: Path) -> None:
    said = printed("plan_a_cluster.py", str(tmp_path / "plan.json"))
    validate(load(Plan, tmp_path / "plan.json"))
    (ratio,) = re.findall(r"best uniform plan, .*, ([\d.]+) times as long", said)
    assert float(ratio) > 1.1


def test_a_plan_is_simulated_and_drawn(tmp_path: Path) -> None:
    said = printed("simulate_and_draw.py", str(tmp_path))
    steps = [float(seconds) for seconds in re.findall(r": ([\d.]+) s per step", said)]
    assert len(steps) == 6
    assert min(steps) < min(steps[0], steps[-1]), "the best cut lies between the ends"
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "</svg>" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


@pytest.mark.dist
@pytest.mark.slow
def test_two_stages_are_trained() -> None:
    said = printed("train_two_stages.py")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+),", said)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5, losses
    assert sorted(re.findall(r"rank (\d) holds ([\d,]+) weights", said)) == [("0", "1,067,008"), ("1", "377,984")]


def test_every_example_is_run_here() -> None:
    names = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(names) == 3
    assert [name for name in names if f'printed("{name}"' not in Path(__file__).read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 75
