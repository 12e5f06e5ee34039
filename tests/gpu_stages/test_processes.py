"""A program is killed at its limit with all its processes, and nothing else is."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_stages.processes import Ended, kill_marked, marked_processes, new_mark, run_limited

LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep({seconds})
"""
"""A program whose child has a session of its own, as ranks under a launcher have."""


def run(program: str, folder: Path, *, limit_s: float) -> Ended:
    return run_limited(
        [sys.executable, "-c", program],
        limit_s=limit_s,
        mark=new_mark(),
        environment=os.environ,
        out=folder / "out",
        errors=folder / "err",
    )


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_output_and_exit_code(tmp_path: Path) -> None:
    ended = run("import sys; print('said'); print('warned', file=sys.stderr); sys.exit(3)", tmp_path, limit_s=60)
    assert (ended.exit_code, ended.num_left) == (3, 0)
    assert (tmp_path / "out").read_text() == "said\n"
    assert (tmp_path / "err").read_text() == "warned\n"


@pytest.mark.parametrize("seconds", [600, 0], ids=["at its limit", "left behind"])
def test_no_process_is_left(seconds: int, tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ended = run(LEAVES_A_CHILD.format(seconds=seconds), tmp_path, limit_s=5 if seconds else 60)
        child = int((tmp_path / "out").read_text())
        assert ended.exit_code == (None if seconds else 0)
        assert ended.num_left == (2 if seconds else 1)
        assert not is_running(child)
        assert other.poll() is None, "it is not of that program"
    finally:
        other.kill()
        other.wait()


def test_processes_are_found_by_their_own_mark(tmp_path: Path) -> None:
    mark, other_mark = new_mark(), new_mark()
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, "MEGATRON_HETERO_GPU_STAGE": mark},
            stdout=out,
        )
    try:
        deadline = time.monotonic() + 30
        while list(marked_processes(mark)) != [process.pid]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert kill_marked(other_mark) == 0
        assert process.poll() is None
    finally:
        assert kill_marked(mark) == 1
        assert process.wait() == -9
