"""A run that is killed at its time limit keeps the outcome of every test that had ended."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu_stages.outcomes import FILE_VARIABLE, TestOutcome, load_outcomes
from tests.gpu_stages.processes import MARK, kill_marked, new_mark
from tests.helpers.sources import ROOT

TESTS = """
import time
import pytest

def test_passes(record_property):
    record_property("kernel", "flash")

def test_fails():
    print("printed before")
    assert 1 == 2, "one is not two"

def test_is_skipped():
    pytest.skip("no engine")

@pytest.fixture
def broken():
    raise ValueError("no device")

def test_has_no_fixture(broken):
    pass

def test_has_parts(subtests):
    for number in range(3):
        with subtests.test(str(number)):
            assert number != 1

def test_hangs():
    time.sleep(600)
"""


def test_what_had_ended_is_kept(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(TESTS)
    outcomes, out, mark = tmp_path / "outcomes.jsonl", tmp_path / "out", new_mark()
    plugin = ("-p", "tests.gpu_stages.outcomes", "-p", "no:cacheprovider")
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), *plugin, str(tmp_path)],
            env={
                **os.environ,
                **{MARK: mark, FILE_VARIABLE: str(outcomes), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            },
            stdout=file,
        )
    try:
        deadline = time.monotonic() + 100
        # Its parts have a line each, and the first one passes.
        while not (outcomes.exists() and re.search('test_has_parts.*"FAILED".*\n', outcomes.read_text())):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        kill_marked(mark)
        process.wait()
    found = load_outcomes(outcomes)
    assert [(each.name.partition("::")[2], each.outcome, each.detail) for each in found] == [
        ("test_passes", "passed", "kernel flash"),
        ("test_fails", "FAILED", "AssertionError: one is not two"),
        ("test_is_skipped", "skipped", "no engine"),
        ("test_has_no_fixture", "ERROR", "ValueError: no device"),
        ("test_has_parts", "FAILED", "assert 1 != 1"),
    ]
    said = out.read_text()
    assert "##### test_file.py::test_fails (call)" in said
    assert "printed before" in said


def test_the_worst_line_of_a_test_counts(tmp_path: Path) -> None:
    lines = [
        '{"name": "a", "outcome": "passed", "seconds": 1.0, "detail": ""}',
        '{"name": "a", "outcome": "ERROR", "seconds": 0.5, "detail": "at its end"}',
        '{"name": "a", "outcome": "passed", "seconds": 0.5, "detail": ""}',
    ]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    assert load_outcomes(tmp_path / "lines") == [
        TestOutcome(name="a", outcome="ERROR", seconds=0.5, detail="at its end")
    ]
