"""What the README and docs/tutorial.md say first, as a reader types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.page_commands import blocks_that_run
from tests.helpers.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAMS = {"hetero": "-m hetero", "python": "", "torchrun": "-m torch.distributed.run"}


def printed(commands: str, folder: Path) -> str:
    """What they print, with this Python and in a folder that has what a clone has."""
    shell = "\n".join(f'{program}() {{ "{sys.executable}" {words} "$@"; }}' for program, words in PROGRAMS.items())
    for entry in ("examples", "hetero", "pretrain_gpt.py", "scripts", "tools"):
        (folder / entry).symlink_to(ROOT / entry)
    # What packages of others warn of says nothing of these commands.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        ["bash", "-c", f"set -e\n{shell}\n{commands}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.rotates(every=3, turn=1)
def test_the_three_steps_of_the_readme(tmp_path: Path) -> None:
    """From a described cluster to a plan with the line of each host; with less time to plan."""
    describe, plan, launch = blocks_that_run(ROOT / "README.md")
    quick = plan.replace("hetero plan", "hetero plan --time-limit 2")
    said = printed("\n".join([describe, quick, launch]), tmp_path)
    assert re.search(r"predicted: .* s per step", said)
    assert said.count("--hetero-plan plan.json") == 2, "a line for each host"
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.rotates(every=6, turn=5)
def test_the_tutorial(tmp_path: Path) -> None:
    """From discovery over a plan and two trainings to an exported model."""
    blocks = blocks_that_run(ROOT / "docs/tutorial.md")
    assert len(blocks) == 8
    said = printed("\n".join(blocks), tmp_path)
    losses = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)/\d+ \| loss ([\d.]+) ", said)}
    assert list(losses) == [10, 20, 30], "the second run goes on where the first one ended"
    assert losses[30] < losses[20] < losses[10]
    assert (tmp_path / "tutorial/report.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "tutorial/exported/config.json").read_text())["num_hidden_layers"] == 4
