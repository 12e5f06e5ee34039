"""Signals to a step and the requeue of its job: with stand-ins for Slurm's commands.

tests/e2e/test_slurm_jobs.py and test_slurm_time_limits.py do so under a real Slurm.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.slurm_run import run_step
from hetero.slurm.job import job_of
from tests.helpers.sources import ROOT

SRUN = """#!/bin/bash
echo $$ > srun.pid
trap 'echo ended at once; exit 143' TERM
while [ ! -e told ]; do sleep 0.05; done
exit $(< told)
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> calls
case "$*" in
    *"show step"*) [ -e srun.pid ] && echo "StepId=$STEP.3 UserId=0 SrunHost:Pid=$(hostname):$(< srun.pid)" ;;
    *"show job"*) echo "JobId=7 JobState=$(< state) Requeue=1 BatchFlag=$BATCH" ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> calls
echo "$SAVES" > saved
echo "$CODE" > told
"""
PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
import hetero.launch.slurm_run as slurm_run
from hetero.slurm.job import job_of
slurm_run._REQUEUE_S = 0
saved = Path("saved")


def newest_saved():
    text = saved.read_text().strip() if saved.exists() else ""
    return int(text) if text else None


newest = newest_saved if "LOADS" in os.environ else None
sys.exit(slurm_run.run_step(job_of(os.environ), ["srun"], os.environ, newest_saved=newest))
"""
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_PROCID": "0", "SLURMD_NODENAME": "a"}
ARRAY = JOB | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
HETEROGENEOUS = JOB | {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "7", "SLURM_JOB_ID_HET_GROUP_1": "8"}


class Run:
    """A launch whose step waits for a signal."""

    def __init__(self, folder: Path, environment: dict[str, str], *, state: str = "RUNNING", **variables: str) -> None:
        self._folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "state").write_text(state)
        own = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
        given = {"STEP": "7", "BATCH": "1", "CODE": "1", "SAVES": "", **environment, **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=folder,
            env={**own, **given, "PATH": f"{folder}:{own['PATH']}"},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while not (folder / "srun.pid").exists():
            time.sleep(0.02)

    def tell(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """The exit code, and what was said."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def calls(self, of: str) -> list[str]:
        path = self._folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(of)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("job", "step", "told", "queued"),
    [
        (JOB, "7", ["scancel --signal=TERM 7.3"], "7"),
        (ARRAY, "7_2", ["scancel --signal=TERM 7_2.3"], "7_2"),
        (HETEROGENEOUS, "7", ["scancel --signal=TERM 7.3", "scancel --signal=TERM 8.3"], "7"),
    ],
    ids=["job", "last task of an array", "heterogeneous"],
)
def test_out_of_time_the_step_alone_is_signalled_and_this_job_alone_requeued(
    tmp_path: Path, job: dict[str, str], step: str, told: list[str], queued: str
) -> None:
    (tmp_path / "saved").write_text("4")
    run = Run(tmp_path, job, STEP=step, SAVES="6", LOADS="yes")
    run.tell()
    assert run.end() == (1, f"hetero: out of time: job {queued} queues itself again, to go on after step 6\n")
    assert run.calls("scancel") == told
    assert run.calls("scontrol requeue") == [f"scontrol requeue {queued}"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SAVES": "", "LOADS": "yes"}, "as nothing was saved since it has started; give it more time (--time)"),
        ({"SAVES": "4", "LOADS": "yes"}, "as nothing was saved since it has started from step 4; give it more time"),
        ({"SAVES": "6", "LOADS": "yes", "CODE": "0"}, ""),
        ({"SAVES": "6", "LOADS": "yes", "BATCH": "0"}, ""),
        ({"SAVES": "6"}, ""),
    ],
    ids=["nothing saved", "nothing new saved", "finished", "no batch job", "would not go on"],
)
def test_it_is_not_queued_again_where_that_gains_nothing(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    if variables["SAVES"]:
        (tmp_path / "saved").write_text("4")
    run = Run(tmp_path, JOB, **variables)
    run.tell()
    _, stderr = run.end()
    assert said in stderr if said else stderr == ""
    assert run.calls("scontrol requeue") == []


@pytest.mark.timeout(120)
def test_a_job_sees_that_slurm_is_sending_it_a_signal(tmp_path: Path) -> None:
    """On a busy machine ``JobState`` is SIGNALING when the job asks at once (Slurm 22.05.8, job_state_string)."""
    (tmp_path / "saved").write_text("4")
    run = Run(tmp_path, JOB, state="SIGNALING", SAVES="6", LOADS="yes")
    run.tell()
    assert "queues itself again" in run.end()[1]
    assert run.calls("scancel") == ["scancel --signal=TERM 7.3"]


@pytest.mark.timeout(120)
def test_ranks_of_a_cancelled_job_have_the_signal_from_slurm(tmp_path: Path) -> None:
    run = Run(tmp_path, JOB, state="COMPLETING", LOADS="yes")
    run.tell()
    (tmp_path / "told").write_text("5")
    assert run.end() == (5, "")
    assert run.calls("scancel") == []


@pytest.mark.timeout(120)
def test_a_first_interrupt_reaches_the_ranks_and_a_second_ends_them(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("4")
    run = Run(tmp_path, JOB, LOADS="yes", CODE="")
    (tmp_path / "scancel").write_text('#!/bin/bash\necho "scancel $*" >> calls\n')
    run.tell(signal.SIGINT)
    while not run.calls("scancel"):
        time.sleep(0.02)
    run.tell(signal.SIGINT)
    assert run.end() == (143, "")
    assert run.calls("scontrol requeue") == []


def test_without_srun_it_says_so() -> None:
    job = job_of(JOB)
    assert job is not None
    with pytest.raises(ConfigError, match="no-such-srun cannot be started: No such file or directory; is Slurm's srun"):
        run_step(job, ["no-such-srun"], {}, newest_saved=None)
