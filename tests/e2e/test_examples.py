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
from hetero.spec.parameters import stage_parameters
from tests.helpers.forked_launch import forked

ROOT = Path(__file__).parents[2]


def command_of(example: str) -> list[str]:
    """The words of the command in an example's docstring, without what may be left out."""
    text = (ROOT / "examples" / example).read_text(encoding="utf-8")
    (line,) = re.findall(rf"^    (.* examples/{example})", text, re.MULTILINE)
    return shlex.split(line)


def printed(example: str, *arguments: str) -> str:
    program, *words = command_of(example)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *words, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_a_cluster_is_planned(tmp_path: Path) -> None:
    said = printed("plan_a_cluster.py", str(tmp_path / "plan.json"))
    validate(load(Plan, tmp_path / "plan.json"))
    (ratio,) = re.findall(r"best uniform plan, .*, ([\d.]+) times as long", said)
    assert float(ratio) > 1.0


@pytest.mark.slow
def test_a_plan_is_simulated_and_drawn(tmp_path: Path) -> None:
    said = printed("simulate_and_draw.py", str(tmp_path))
    steps = [float(seconds) for seconds in re.findall(r": ([\d.]+) s per step", said)]
    assert len(steps) == 6
    assert min(steps) < min(steps[0], steps[-1]), "the best cut lies between the ends"
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert "</svg>" in (tmp_path / "timeline.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
@pytest.mark.dist
def test_two_stages_are_trained() -> None:
    *torchrun, script = command_of("train_two_stages.py")
    assert torchrun[-2:] == ["--nproc-per-node", "2"]
    done = forked(2, [], script=script)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+),", said)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5, losses
    model = load(Plan, ROOT / "scripts/presets/plans/quickstart.json").model
    for rank, (first, end) in enumerate([(0, 6), (6, 8)]):
        held = sum(each.numel for each in stage_parameters(model, first_layer=first, end_layer=end))
        assert f"rank {rank} holds {held:,} weights" in said


def test_every_example_is_run_here() -> None:
    names = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert names
    assert [name for name in names if f'("{name}"' not in Path(__file__).read_text(encoding="utf-8")] == []
