"""Stages run in their order and within their limits, and every result is there as soon as its stage has ended."""

import dataclasses
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu_stages.results import StageResult, errors_file, load_results, output_file
from tests.gpu_stages.run import FolderInUseError, RunOptions, StageRun, commit_of, lock_folder
from tests.gpu_stages.stages import Stage
from tests.gpu_stages.target import Target
from tests.gpu_stages.test_processes import is_running
from tests.helpers.sources import ROOT

CPU = Target(device="cpu", name="cpu")


def stage(name: str, program: str, *, limit_s: float = 60, **more: object) -> Stage:
    made = Stage(name=name, shows=f"what {name} shows", command=("-c", program), limit_s=limit_s, is_alone=True)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # of this file's callers


def run(folder: Path, *stages: Stage, **options: object) -> tuple[bool, dict[str, StageResult]]:
    made = dataclasses.replace(RunOptions(target=CPU, out=folder), **options)  # type: ignore[arg-type]
    passed = StageRun(made).run(stages)
    return passed, {result.name: result for result in load_results(folder)}


def test_a_stage_at_its_limit_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    passed, results = run(
        tmp_path,
        stage("hangs", "import time; print('began', flush=True); time.sleep(600)", limit_s=3),
        stage("fails", "import sys; print('why', file=sys.stderr); sys.exit(4)"),
        stage("passes", "print('all is well')"),
    )
    assert not passed
    assert {name: (each.outcome, each.detail) for name, each in results.items()} == {
        "hangs": ("over its limit", "killed after 3 s, 1 processes in all"),
        "fails": ("failed", "exit code 4"),
        "passes": ("passed", ""),
    }
    assert results["hangs"].seconds >= 3
    assert output_file(tmp_path, "hangs").read_text() == "began\n"
    assert errors_file(tmp_path, "fails").read_text() == "why\n"
    report = (tmp_path / "report.md").read_text()
    assert "| hangs | what hangs shows | over its limit | " in report
    assert "all is well" in report


def test_results_and_report_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    look = "import pathlib, sys; sys.exit('| first | ' not in pathlib.Path(sys.argv[1], 'report.md').read_text())"
    second = stage("second", "")
    second = dataclasses.replace(second, command=("-c", look, str(tmp_path)))
    passed, results = run(tmp_path, stage("first", ""), second)
    assert passed
    assert [result.outcome for result in results.values()] == ["passed", "passed"]


def test_what_cannot_run_says_why(tmp_path: Path) -> None:
    passed, results = run(
        tmp_path,
        stage("base", "raise SystemExit(1)"),
        stage("needs-base", "", needs="base"),
        stage("needs-what-did-not-run", "", needs="another"),
        stage("engine", "", needs_engine=True),
    )
    assert not passed
    assert {name: (each.outcome, each.detail) for name, each in results.items()} == {
        "base": ("failed", "exit code 1"),
        "needs-base": ("not run", "it needs base, which has not passed"),
        "needs-what-did-not-run": ("passed", ""),
        "engine": ("not run", "TransformerEngine runs on CUDA alone"),
    }


def test_no_stage_begins_when_no_time_is_left(tmp_path: Path) -> None:
    passed, results = run(
        tmp_path,
        stage("first", "import time; time.sleep(600)", limit_s=60),
        stage("second", ""),
        total_s=9,
    )
    assert not passed
    assert results["first"].outcome == "over its limit"
    assert results["first"].detail.endswith("in all; the time of the whole run was over")
    assert (results["second"].outcome, results["second"].detail) == ("not run", "no time is left")


def test_another_run_replaces_only_what_it_ran(tmp_path: Path) -> None:
    run(tmp_path, stage("one", "raise SystemExit(1)"), stage("two", "raise SystemExit(1)"))
    _, results = run(tmp_path, stage("two", ""))
    assert {name: each.outcome for name, each in results.items()} == {"one": "failed", "two": "passed"}


def test_a_run_without_time_leaves_what_an_earlier_one_has_shown(tmp_path: Path) -> None:
    run(tmp_path, stage("one", ""))
    run(tmp_path, stage("one", ""), stage("two", ""), total_s=0.0)
    results = {result.name: result.outcome for result in load_results(tmp_path)}
    assert results == {"one": "passed", "two": "not run"}


def test_stages_that_measure_nothing_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other's file; the one that is alone sees both done."""
    meet = """
import pathlib, sys, time
mine, other = (pathlib.Path(sys.argv[1], name) for name in sys.argv[2:])
mine.touch()
while not other.exists():
    time.sleep(0.01)
"""
    together = [
        dataclasses.replace(stage(name, "", is_alone=False), command=("-c", meet, str(tmp_path), name, other))
        for name, other in (("a", "b"), ("b", "a"))
    ]
    passed, _ = run(tmp_path / "out", *together, together=2)
    assert passed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "together"])
def test_a_signal_ends_the_stages_that_run(number: signal.Signals, is_alone: bool, tmp_path: Path) -> None:
    """With what they started, also in a session of its own; the report says which stages were ended."""
    program = f"""
import dataclasses, pathlib
from tests.gpu_stages.test_run import run, stage
sleep = "import os, subprocess, sys, time\\n"
sleep += "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\\n"
sleep += "print(os.getpid(), other.pid, flush=True); time.sleep(600)"
stages = [dataclasses.replace(stage(name, sleep), is_alone={is_alone}) for name in ("one", "two", "three")]
run(pathlib.Path({str(tmp_path / "out")!r}), *stages, together=2)
"""
    # Whoever started the tests in the background, or by nohup, may have left SIGINT or SIGHUP ignored.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    heard += "; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    process = subprocess.Popen(
        [sys.executable, "-c", heard + program],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    running = ["one"] if is_alone else ["one", "two"]
    said = [output_file(tmp_path / "out", name) for name in running]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text().endswith("\n") for file in said):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    for pid in " ".join(file.read_text() for file in said).split():
        assert not is_running(int(pid))
    outcomes = {result.name: result.outcome for result in load_results(tmp_path / "out")}
    assert outcomes == dict.fromkeys(running, "interrupted")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| one | what one shows | interrupted | " in report


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "out"), pytest.raises(FolderInUseError, match="name another folder by --out"):
        run(tmp_path / "out", stage("one", ""))
    passed, _ = run(tmp_path / "out", stage("one", ""))
    assert passed


def test_a_run_in_which_no_stage_ran_has_not_passed(tmp_path: Path) -> None:
    passed, results = run(tmp_path, stage("one", ""), total_s=0.0)
    assert not passed
    assert results["one"].outcome == "not run"


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    """Not of a repository around it; and the files may differ from it."""

    def git(*arguments: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    commit = commit_of(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", commit)
    (tmp_path / "copy").mkdir()
    assert commit_of(tmp_path / "copy") == ""
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
