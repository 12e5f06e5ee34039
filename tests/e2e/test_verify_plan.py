"""``tools/verify_plan.py`` as a user runs it."""

import dataclasses
from pathlib import Path

import pytest

from hetero.serialization import save
from tests.helpers.commands import WORLD_SIZE, command_line, good_plan, model_of
from tests.helpers.forked_launch import forked
from tests.helpers.plans import sharded

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = "tools/verify_plan.py"


@pytest.mark.rotates(every=2, turn=0)
def test_a_plan_that_gathers_weights_beside_the_forward_agrees(tmp_path: Path) -> None:
    """Also after the last step, when no forward comes any more that would wait for them."""
    save(sharded(good_plan()), tmp_path / "plan.json")
    flags = [*command_line(hetero_plan=str(tmp_path / "plan.json")), "--overlap-param-gather"]
    done = forked(WORLD_SIZE, ["--verify-steps", "3", *flags], script=SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-09): they agree" in done.stdout


MOE = command_line(
    num_experts="4",
    disable_bias_linear="",
    swiglu="",
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff="0.1",
)


def test_an_auxiliary_loss_of_microbatches_of_two_samples_agrees() -> None:
    """The one process has microbatches of two samples, too."""
    done = forked(
        2, ["--verify-steps", "2", *MOE, "--micro-batch-size", "2", "--global-batch-size", "8"], script=SCRIPT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-09): they agree" in done.stdout
    assert "compared" not in done.stdout


def test_what_no_single_process_computes_is_left_out_and_said(tmp_path: Path) -> None:
    """An auxiliary loss over microbatches of 2 samples and of 1, and dropout, which the plan states as well."""
    plan = dataclasses.replace(good_plan(model_of([*MOE, "--micro-batch-size", "1"])), hidden_dropout=0.2)
    first = plan.replicas[0].with_stage(0, sequence_parallel=True)
    save(plan.with_replicas({0: first}), tmp_path / "plan.json")
    flags = ["--hetero-plan", str(tmp_path / "plan.json"), "--hidden-dropout", "0.2"]
    done = forked(WORLD_SIZE, ["--verify-steps", "2", *MOE, *flags], script=SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(limit 1e-09): they agree" in done.stdout
    assert "compared without dropout, whose random numbers are per rank\n" in done.stdout
    assert "compared with seq_aux_loss in place of aux_loss" in done.stdout
    assert "the plan has them of 1 and 2 samples, so no single process computes that loss\n" in done.stdout
