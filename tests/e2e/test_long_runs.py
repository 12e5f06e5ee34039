"""A run that is stopped, continued under another plan, evaluated, and trained in half precision, as users do it."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetero.checkpoint.folder import published_steps
from hetero.serialization import save
from tests.helpers.commands import WORLD_SIZE, Finished, command_line, good_plan, launch, launched
from tests.helpers.forked_launch import forked
from tests.helpers.plans import sharded
from tests.unit.pretrain.corpora import write_corpus

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


@pytest.mark.rotates(every=4, turn=1)
def test_a_resume_says_what_is_different(tmp_path: Path) -> None:
    """Each with the old value and the new one, once, by one rank; and nothing of a run that is as it was."""
    data = [
        write_corpus(tmp_path / name, [[i + shift] * 40 for i in range(50)]) for name, shift in (("a", 0), ("b", 1))
    ]
    same = {"micro_batch_size": "1", "save": str(tmp_path / "out"), "load": str(tmp_path / "out"), "train_iters": STEPS}

    def notes(path: str, **changes: str) -> list[str]:
        argv = [*command_line(**{**same, **changes})[1:], "--data-path", path]
        run = forked(2, argv)
        assert run.returncode == 0, run.stderr
        return [line for line in run.stdout.splitlines() if line.startswith("note: ")]

    assert notes(data[0], exit_interval="2") == []
    assert notes(data[0], exit_interval="3") == []
    changed = notes(data[1], exit_interval="4", lr="5e-3", adam_beta1="0.8")
    assert changed == [
        f"note: data: {data[0]} when step 3 was saved, {data[1]} now: from now on other tokens are trained on, in "
        "an order of their own",
        "note: --adam-beta1: 0.9 when step 3 was saved, 0.8 now, which counts from now on",
        "note: --lr: 0.01 when step 3 was saved, 0.005 now, which counts from now on",
    ]


CUTS_DATA = """
import os, sys
import pretrain_gpt
from hetero.runtime import cpu_backend
cpu_backend.install()
from hetero.runtime.session import TrainingSession
step = TrainingSession.step
def cutting(session, **options):
    if session.steps_done == 1:
        os.truncate(sys.argv[sys.argv.index("--data-path") + 1] + ".bin", 4096)
    return step(session, **options)
TrainingSession.step = cutting
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


@pytest.mark.rotates(every=4, turn=3)
@pytest.mark.parametrize("num_workers", ["0", "2"])
def test_a_run_whose_data_is_cut_saves_the_step_in_hand(num_workers: str, tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[i] * 400 for i in range(50)])
    (tmp_path / "cut.py").write_text(CUTS_DATA)
    argv = command_line(micro_batch_size="1", train_iters="60", num_workers=num_workers, save=str(tmp_path / "out"))
    run = forked(2, [*argv[1:], "--data-path", prefix], script=str(tmp_path / "cut.py"))
    assert run.returncode == 2
    (said,) = [line for line in run.stderr.splitlines() if line.startswith("hetero: ")]
    assert f"{prefix}.bin: 4096 bytes now, its index counts 40000; it was cut or written again" in said
    (saved,) = published_steps(tmp_path / "out")
    assert 2 <= saved < 60


def signal_every_process(launcher: psutil.Process) -> None:
    """As systemd, a container's stop and ``pkill -f`` do it; torchrun then signals its ranks once more."""
    for process in [launcher, *launcher.children(recursive=True)]:
        process.send_signal(signal.SIGTERM)


def signal_one_rank(launcher: psutil.Process) -> None:
    """With its readers, which are in its process group."""
    os.killpg(os.getpgid(ranks_of(launcher)[-1].pid), signal.SIGTERM)


def interrupt(launcher: psutil.Process) -> None:
    """As Ctrl-C does it: torchrun, whose ranks have sessions of their own, interrupts them. Twice, in a hurry."""
    launcher.send_signal(signal.SIGINT)
    for rank in ranks_of(launcher):
        rank.send_signal(signal.SIGINT)


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [each for each in launcher.children() if "pretrain_gpt.py" in " ".join(each.cmdline())]


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        # torchrun calls it a failure that it was signalled itself.
        pytest.param(signal_every_process, 1, marks=pytest.mark.rotates(every=6, turn=2)),
        pytest.param(signal_one_rank, 0, marks=pytest.mark.rotates(every=6, turn=4)),
        pytest.param(interrupt, 1, marks=pytest.mark.rotates(every=6, turn=0)),
    ],
)
def test_a_stopped_run_saves_and_goes_on(stop: Callable[[psutil.Process], None], code: int, tmp_path: Path) -> None:
    """Whoever gets the signal: all ranks end after the same step, which is saved, and a relaunch goes on from there."""
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
        stop(psutil.Process(process.pid))
        stdout, stderr = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == code, stderr
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
