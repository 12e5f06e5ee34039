"""A run that is stopped, continued under another plan, evaluated, and trained in half precision, as users do it."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hetero.checkpoint.folder import published_steps
from hetero.serialization import save
from tests.helpers.commands import WORLD_SIZE, Finished, command_line, good_plan, launch, launched
from tests.helpers.forked_launch import forked
from tests.helpers.plans import sharded

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = "6"


def losses(run: Finished) -> dict[int, float]:
    found = re.findall(r"^step +(\d+)/\d+ \| loss (\d+\.\d+)", run.stdout, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def valid_losses(run: Finished) -> dict[int, float]:
    found = re.findall(r"^step +(\d+)/\d+ \| valid loss (\d+\.\d+)", run.stdout, flags=re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_stopped_and_continued_under_another_plan(tmp_path: Path) -> None:
    """Four ranks to step 4, then two ranks: the losses are those of two ranks alone, also on validation data."""
    save(sharded(good_plan()), tmp_path / "plan.json")
    common = {"train_iters": STEPS, "eval_iters": "2", "eval_interval": "2", "use_distributed_optimizer": ""}
    uniform = {"micro_batch_size": "1", "pipeline_model_parallel_size": "2", **common}
    folder = {"save": str(tmp_path / "out"), "load": str(tmp_path / "out")}
    first = forked(
        WORLD_SIZE,
        command_line(
            hetero_plan=str(tmp_path / "plan.json"),
            exit_interval="4",
            save_interval="2",
            hetero_keep_last="1",
            async_save="",
            **common,
            **folder,
        ),
    )
    assert first.returncode == 0, first.stderr
    assert "no checkpoint yet, training starts from --seed" in first.stdout
    assert "stopped after step 4 of 6" in first.stdout
    assert published_steps(tmp_path / "out") == [4]
    second = forked(2, command_line(**uniform, **folder))
    assert second.returncode == 0, second.stderr
    assert "training goes on after step 4" in second.stdout
    alone = forked(2, command_line(**uniform))
    assert alone.returncode == 0, alone.stderr
    assert losses(first) | losses(second) == pytest.approx(losses(alone), abs=2e-5)
    assert valid_losses(first) | valid_losses(second) == pytest.approx(valid_losses(alone), abs=2e-5)
    assert list(valid_losses(alone)) == [2, 4, 6]


@pytest.mark.rotates(every=6, turn=2)
def test_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    """One rank gets the signal: all end after the same step, with success, and a relaunch goes on from there."""
    argv = command_line(
        micro_batch_size="1",
        train_iters="100000",
        save=str(tmp_path / "out"),
        load=str(tmp_path / "out"),
        bf16="",
        num_workers="2",
    )
    process = launch(2, argv)
    try:
        lines = iter(process.stdout.readline, "")
        assert next((line for line in lines if line.startswith("step ")), None), "it ended before the first step"
        ranks = [
            each for each in psutil.Process(process.pid).children() if "pretrain_gpt.py" in " ".join(each.cmdline())
        ]
        # As a launcher does it: the rank's readers are in its group.
        os.killpg(os.getpgid(ranks[-1].pid), signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 0, stderr
    (stopped,) = re.findall(r"stopped after step (\d+) of 100000", stdout)
    assert published_steps(tmp_path / "out") == [int(stopped)]
    again = launched(2, [*argv, "--exit-interval", str(int(stopped) + 1)])
    assert f"training goes on after step {stopped}" in again.stdout, again.stderr
    assert again.returncode == 0


def end(process: subprocess.Popen[str]) -> None:
    """torchrun ends its ranks when it is told to."""
    if process.poll() is None:
        process.terminate()
        deadline = time.monotonic() + 40
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
