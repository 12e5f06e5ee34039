"""``tools/verify_plan.py`` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.serialization import save
from tests.helpers.commands import ROOT, WORLD_SIZE, command_line, good_plan
from tests.helpers.plans import sharded

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_plan_that_gathers_weights_beside_the_forward_agrees(tmp_path: Path) -> None:
    """Also after the last step, when no forward comes any more that would wait for them."""
    save(sharded(good_plan()), tmp_path / "plan.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    flags = [*command_line(hetero_plan=str(tmp_path / "plan.json")), "--overlap-param-gather"]
    done = subprocess.run(
        [*torchrun, "tools/verify_plan.py", "--verify-steps", "3", *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-09): they agree" in done.stdout
