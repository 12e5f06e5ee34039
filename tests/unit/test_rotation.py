"""Over the runs every case has its turn, and a run can be had again."""

import subprocess
from pathlib import Path

from tests.helpers.rotation import rotation_of_today, waiting

ROWS = {"one": ["a"], "two": ["b", "c"], "three": ["d", "e", "f"]}


def test_a_run_takes_one_case_of_a_row_and_the_next_run_another() -> None:
    for rotation in range(10):
        left = set(waiting(ROWS, rotation))
        for cases in ROWS.values():
            assert len(set(cases) - left) == 1
    for row, cases in ROWS.items():
        turns = [set(cases) - set(waiting({row: cases}, rotation)) for rotation in range(7, 7 + len(cases))]
        assert set().union(*turns) == set(cases)


def test_rows_are_not_all_at_the_same_case() -> None:
    rows = {str(number): ["first", "second"] for number in range(40)}
    first = sum(list(waiting({row: cases}, 5)) == ["second"] for row, cases in rows.items())
    assert 5 < first < 35


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_commits_are_counted_where_there_is_a_history(tmp_path: Path) -> None:
    with_history, shallow, without = (tmp_path / name for name in ("history", "shallow", "none"))
    for folder in (with_history, without):
        folder.mkdir()
    git(with_history, "init")
    for _ in range(3):
        git(with_history, "commit", "--allow-empty", "--message", "a change")
    git(tmp_path, "clone", "--depth", "1", f"file://{with_history}", str(shallow))
    assert rotation_of_today(with_history) == 3
    git(with_history, "checkout", "-b", "a-change-in-two-commits")
    for _ in range(2):
        git(with_history, "commit", "--allow-empty", "--message", "a part of it")
    git(with_history, "checkout", "-")
    git(with_history, "merge", "--no-ff", "--message", "merged", "a-change-in-two-commits")
    assert rotation_of_today(with_history) == 4
    assert rotation_of_today(shallow) == rotation_of_today(without) > 700_000, "the day"
