"""The first command of the README, with few steps: real text in, a model trained under an uneven plan, the proof."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quickstart(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", "10", "2"],
        cwd=ROOT,
        env=os.environ | {"VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"^step .*\| loss ([\d.]+) ", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1.0, losses
    assert len(re.findall(r"they agree", done.stdout)) == 2
    assert "replica 1" in done.stdout
    assert "Warning" not in done.stderr, done.stderr
    # The last line is for a shell, wherever that is.
    shown = subprocess.run(["bash", "-c", done.stdout.splitlines()[-1]], cwd=tmp_path, capture_output=True, check=False)
    assert (shown.returncode, b"replica 0" in shown.stdout) == (0, True), shown.stderr
