"""``tools/verify_plan.py`` as a user runs it."""

from pathlib import Path

import pytest

from hetero.serialization import save
from tests.helpers.commands import WORLD_SIZE, command_line, good_plan
from tests.helpers.forked_launch import forked
from tests.helpers.plans import sharded

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.rotates(every=2, turn=0)
def test_a_plan_that_gathers_weights_beside_the_forward_agrees(tmp_path: Path) -> None:
    """Also after the last step, when no forward comes any more that would wait for them."""
    save(sharded(good_plan()), tmp_path / "plan.json")
    flags = [*command_line(hetero_plan=str(tmp_path / "plan.json")), "--overlap-param-gather"]
    done = forked(WORLD_SIZE, ["--verify-steps", "3", *flags], script="tools/verify_plan.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-09): they agree" in done.stdout
