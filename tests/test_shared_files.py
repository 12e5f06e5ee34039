"""Processes that share the files of a run: each test runs once, and what failed in either is told and noted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.small_suite import small_suite

CONFTEST = """
import os, pytest
@pytest.fixture(scope="session")
def server():
    with open("servers", "a") as file:
        print("started", os.getpid(), file=file)
    yield
"""

TWO_WORKERS = """
import sys
from tests.helpers import workers
workers._import_for_all = lambda: None
sys.exit(workers.main(["2", *sys.argv[1:]]))
"""
"""Without the seconds that torch takes, which nobody here needs."""

TESTS = """
import os, time, pytest
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("number", range(3))
def test_one(number):
    with open("ran", "a") as file:
        print(os.getpid(), __file__, number, file=file)
    time.sleep(0.1)
    assert not (number == 2 and __file__.endswith(("file_0.py", "file_4.py")))

@pytest.mark.slow
def test_of_the_whole_run():
    assert False
"""


@pytest.mark.slow
def test_each_test_runs_once_and_failures_of_all_are_noted(tmp_path: Path) -> None:
    (folder := small_suite(tmp_path) / "tests" / "unit").mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    for number in range(5):
        (folder / f"test_file_{number}.py").write_text(TESTS)
    (share := tmp_path / "share").mkdir()
    words = ["-q", "-m", "not slow", f"--share-files={share}"]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, *command, *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    both = run("-c", TWO_WORKERS)
    # A third one comes when nothing is left.
    late = run("-m", "pytest")
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) == len({(file, number) for _, file, number in ran}) == 15, both.stdout + both.stderr
    processes = {process for process, _, _ in ran}
    servers = [line.split()[1] for line in (tmp_path / "servers").read_text().splitlines()]
    assert sorted(servers) == sorted(processes), "one for all files of a process"
    assert all(len({process for process, where, _ in ran if where == file}) == 1 for _, file, _ in ran)
    assert both.returncode == 1, both.stdout + both.stderr
    assert late.returncode == 0, late.stdout
    failed = {f"tests/unit/test_file_{number}.py::test_one[2]" for number in (0, 4)}
    noted = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert noted.keys() == failed
    assert [name for name in failed if f"FAILED {name}" not in both.stdout] == []
