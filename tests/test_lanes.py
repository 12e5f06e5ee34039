"""The lanes of ``scripts/test.sh``: what the second one runs and on what, and how both come to one result."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers import lanes
from tests.helpers.sources import ROOT

SUBJECTS = (
    "quick start",
    "layouts",
    "split backward",
    "stock megatron-core",
    "TransformerEngine",
    "checkpoints",
    "flags",
    "bits",
)
"""What the second lane is for."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_subject_is_in_every_run_of_the_second_lane() -> None:
    """Whatever turn the cases that rotate have."""
    files = [ROOT / "tests" / place for subject in SUBJECTS for place in lanes.NEWEST_STACK[subject]]
    collected = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "--in-every-run",
            "-m",
            "newest_stack",
            *map(str, files),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {line.partition("::")[0] for line in collected.stdout.splitlines() if "::" in line}
    for subject in SUBJECTS:
        places = [Path("tests", place) for place in lanes.NEWEST_STACK[subject]]
        assert [place for place in places if not (ROOT / place).exists()] == []
        assert any(Path(file).is_relative_to(place) for file in found for place in places), subject


def test_an_environment_that_is_not_the_second_lanes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"megatron-core": "0.19.2", "torch": "2.15.0+cpu"}
    monkeypatch.setattr(lanes, "installed_version", installed.get)
    monkeypatch.setattr(lanes, "NEWEST_PYTHON", sys.version_info[:2])
    monkeypatch.setattr(lanes, "pinned_versions", lambda: {"megatron-core": "0.19.2", "torch": "2.15.0"})
    assert lanes.problems_of_newest_stack() == []
    installed |= {"megatron-core": "0.18.2", "triton": "3.8.0"}
    assert lanes.problems_of_newest_stack() == [
        "megatron-core is 0.18.2, must be 0.19.2",
        "triton is 3.8.0, must be missing",
    ]
    monkeypatch.setattr(lanes, "NEWEST_PYTHON", (3, 99))
    assert lanes.problems_of_newest_stack()[0].endswith("must be 3.99")


def test_results_of_all_workers_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "installed_version", {"megatron-core": "0.19.2", "torch": "2.15.0"}.get)
    for pid, passed in ((1, 1000), (2, 234)):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        lanes.note_outcomes(tmp_path, {"passed": passed, "failed": pid, "error": 0, "skipped": 0})
    version = sys.version.split()[0]
    assert lanes.describe(tmp_path) == (
        f"Python {version}, megatron-core 0.19.2, torch 2.15.0, no Triton: 1,234 passed, 3 failed"
    )


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def python_that(path: Path, *, runs: bool) -> Path:
    """A stand-in for ``python3.X``: this Python, or a shim of pyenv for a version that is not selected."""
    return script(path, f'exec {sys.executable} "$@"' if runs else "echo 'pyenv: command not found' >&2; exit 127")


def run_shell(words: str, environment: Mapping[str, str | Path]) -> subprocess.CompletedProcess[str]:
    """Run ``words`` after scripts/environment.sh, with nothing on PATH but the system's commands."""
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {ROOT / 'scripts' / 'environment.sh'}; {words}"],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": "/nonexistent",
            **{name: str(value) for name, value in environment.items()},
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("place", ["PATH", "pyenv", "uv", "nowhere"])
def test_a_python_is_found_where_it_runs(place: str, tmp_path: Path) -> None:
    shims, pyenv, uv = tmp_path / "shims", tmp_path / "pyenv", tmp_path / "uv"
    python_that(shims / "python3.98", runs=place == "PATH")
    if place == "pyenv":
        python_that(pyenv / "versions" / "3.98.1" / "bin" / "python3.98", runs=True)
    if place == "uv":
        python_that(uv / "cpython-3.98.4-linux-x86_64-gnu" / "bin" / "python3.98", runs=True)
    folders = {"PATH": f"{shims}:/usr/bin:/bin", "PYENV_ROOT": pyenv, "UV_PYTHON_INSTALL_DIR": uv}
    found = run_shell("find_python 3.97 3.98", folders)
    assert (found.returncode, found.stdout.strip()) == ((1, "") if place == "nowhere" else (0, sys.executable)), (
        found.stderr
    )


def test_an_environment_that_cannot_be_used_is_noticed(tmp_path: Path) -> None:
    def problem(name: str) -> str:
        return run_shell(f"environment_problem {tmp_path / name}", {}).stdout.strip()

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "made")], check=True)
    assert problem("made") == "it was left half made, or its Python was replaced"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "made" / "lib" / version / "site-packages" / "pip.py").touch()
    assert problem("made") == ""
    (tmp_path / "made").rename(tmp_path / "moved")
    assert problem("moved") == f"it was made as {tmp_path / 'made'}, and its commands start that one"
    (tmp_path / "moved" / "bin" / "python").unlink()
    assert problem("moved") == "its Python does not run"


@pytest.mark.parametrize("made_by", ["uv", "conda"])
def test_what_others_made_and_runs_is_kept(made_by: str, tmp_path: Path) -> None:
    """uv leaves pip out, and conda has no script to activate it."""
    folder = tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (folder / "of-the-user").touch()
    if made_by == "conda":
        for name in ("pyvenv.cfg", "bin/activate"):
            (folder / name).unlink()
    made = run_shell(f"make_environment {folder} {sys.version_info[0]}.{sys.version_info[1]}", {})
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    assert (folder / "of-the-user").exists()
    assert subprocess.run([str(folder / "bin" / "python"), "-c", "import pip"], check=False).returncode == 0


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with ``scripts/test.sh``, whose environments, checks and tests are stand-ins.

    A lane's Python writes its calls into ``calls``, and ends a call as the file named after lane and call says.
    """
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    prepared = '[ ! -e "$repository/unprepared$1" ] || return 1'
    stand_ins = ["repository=$PWD", f"prepare_environment() {{ {prepared}; }}", "find_python() { [ ! -e no-python ]; }"]
    stand_ins += [f"prepare_{name}() {{ :; }}" for name in ("etcd", "openssl", "slurm")]
    (tmp_path / "scripts" / "environment.sh").write_text("\n".join(stand_ins), encoding="utf-8")
    for lane, folder in ((1, ".venv"), (2, ".venv-newest")):
        for name in ("ruff", "lint-imports", "mypy"):
            script(tmp_path / folder / "bin" / name, "exit 0")
        call = (
            'call="$2"; [[ "$*" != *--second-chance* ]] || call=second-chance; [[ "$3" != describe ]] || call=describe'
        )
        answers = f'echo "{lane} $call" >> calls; [ "$call" != describe ] || echo "stack {lane}: 7 passed"'
        script(
            tmp_path / folder / "bin" / "python",
            f'{call}; {answers}; if [ -e "{lane}-$call.sh" ]; then source "./{lane}-$call.sh"; fi; exit 0',
        )
    return tmp_path


def run_lanes(repository: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/test.sh", *words], cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )


WORKERS = "tests.helpers.workers"


@pytest.mark.parametrize(
    ("exit_codes", "code", "results"),
    [
        ({}, 0, ["lane 1: stack 1: 7 passed", "lane 2: stack 2: 7 passed"]),
        (
            {f"1-{WORKERS}": 1, "1-second-chance": 1},
            1,
            ["lane 1: stack 1: 7 passed; FAILED (exit code 1)", "lane 2: stack 2: 7 passed"],
        ),
        (
            {f"1-{WORKERS}": 3, f"2-{WORKERS}": 2},
            3,
            ["lane 1: stack 1: 7 passed; FAILED (exit code 3)", "lane 2: stack 2: 7 passed; FAILED (exit code 2)"],
        ),
        (
            {f"1-{WORKERS}": 1, f"2-{WORKERS}": 1, "2-second-chance": 4},
            4,
            [
                "lane 1: stack 1: 7 passed, and passed when run again",
                "lane 2: stack 2: 7 passed; FAILED (exit code 4)",
            ],
        ),
        (
            {"2-tests.helpers.lanes": 1},
            1,
            ["lane 1: stack 1: 7 passed", "lane 2: NOT RUN, its environment is not what it should be"],
        ),
    ],
    ids=["both pass", "the first fails twice", "both end otherwise", "second chances", "another stack"],
)
def test_both_lanes_count(exit_codes: Mapping[str, int], code: int, results: list[str], repository: Path) -> None:
    for name, value in exit_codes.items():
        (repository / f"{name}.sh").write_text(f"exit {value}", encoding="utf-8")
    done = run_lanes(repository)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (code, results), done.stdout + done.stderr


def test_a_second_lane_without_its_python_is_said_twice(repository: Path) -> None:
    shutil.rmtree(repository / ".venv-newest")
    (repository / "no-python").touch()
    done = run_lanes(repository)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[-2] == "lane 1: stack 1: 7 passed"
    assert lines[-1].startswith("lane 2: NOT RUN, for no Python 3.12 was found")
    assert f"== {lines[-1]}" in lines


def test_a_second_lane_whose_environment_cannot_be_made_is_a_failure(repository: Path) -> None:
    (repository / "unprepared.venv-newest").touch()
    done = run_lanes(repository)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "lane 2: NOT RUN, its environment could not be made")


def test_options_reach_both_lanes(repository: Path) -> None:
    for lane in (1, 2):
        (repository / f"{lane}-{WORKERS}.sh").write_text(f'printf "%s|" {lane} "$@" >> words', encoding="utf-8")
    done = run_lanes(repository, "--fast", "--rotation", "7", "--workers", "5")
    assert done.returncode == 0, done.stderr
    first, second = (repository / "words").read_text(encoding="utf-8").split("|2|")
    for words, marks in ((first, "|not slow|"), (second, "|newest_stack and not slow|")):
        assert f"{WORKERS}|5|" in words
        assert "|--rotation|7|" in words
        assert marks in words
    assert (repository / "calls").read_text(encoding="utf-8").split()[::2] == ["1", "1", "2", "2", "2", "2"]


@pytest.mark.parametrize("lane", ["1", "2"])
def test_one_lane_alone(lane: str, repository: Path) -> None:
    done = run_lanes(repository, "--lane", lane)
    assert (done.returncode, done.stdout.splitlines()[-2:]) == (
        0,
        ["== results", f"lane {lane}: stack {lane}: 7 passed"],
    )
    assert {line[0] for line in (repository / "calls").read_text(encoding="utf-8").splitlines()} == {lane}


@pytest.mark.parametrize("number", ["INT", "TERM"])
def test_a_signal_ends_both_lanes(number: str, repository: Path) -> None:
    """Tests that run are interrupted, and the second lane does not start."""
    waits = "trap 'echo interrupted >> calls; exit 2' TERM; kill -{} $PPID; while :; do sleep 0.05; done"
    (repository / f"1-{WORKERS}.sh").write_text(waits.format(number), encoding="utf-8")
    done = run_lanes(repository)
    assert done.returncode == {"INT": 130, "TERM": 143}[number], done.stdout + done.stderr
    assert (repository / "calls").read_text(encoding="utf-8").splitlines() == [f"1 {WORKERS}", "interrupted"]
