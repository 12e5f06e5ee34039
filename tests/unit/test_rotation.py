"""Over the runs every case has its turn, and a run can be had again."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.rotation import MOST_RUNS, RUN_NUMBERS, Row, rotation_of_today, waiting

ROWS = [Row(name=cases, cases=list(cases)) for cases in ("a", "bc", "def")]
RARE = [Row(name=cases, cases=list(cases), every=every) for cases, every in (("a", 6), ("bc", 3), ("def", 2))]


def taken(row: Row[str], rotation: int) -> set[str]:
    return set(row.cases) - set(waiting([row], rotation))


def test_a_run_takes_one_case_of_a_row_and_the_next_run_another() -> None:
    for row in ROWS:
        assert {len(taken(row, rotation)) for rotation in range(10)} == {1}
        assert row.runs == len(row.cases)


@pytest.mark.parametrize("row", [*ROWS, *RARE], ids=lambda row: f"{len(row.cases)} cases every {row.every}")
def test_consecutive_runs_take_some_of_every_row_and_then_all_of_it(row: Row[str]) -> None:
    for first in range(7, 12):
        turns = [taken(row, rotation) for rotation in range(first, first + row.runs)]
        assert any(turns[:MOST_RUNS])
        assert sorted(case for turn in turns for case in turn) == row.cases, "each once"


def test_a_row_may_name_its_turn() -> None:
    assert [rotation for rotation in range(12) if taken(Row(name="a", cases=["a"], every=3, turn=2), rotation)] == [
        *(2, 5, 8, 11)
    ]


@pytest.mark.parametrize(("every", "turn"), [(5, None), (24, None), (0, None), (3, 3)])
def test_a_row_that_would_wait_for_ever_is_refused(every: int, turn: int | None) -> None:
    with pytest.raises(ValueError, match="must"):
        Row(name="a", every=every, turn=turn)


def test_rows_are_not_all_at_the_same_case_nor_in_the_same_run() -> None:
    rows = [Row(name=str(number), cases=["first", "second"]) for number in range(40)]
    assert 5 < sum(row.taken(5) == "first" for row in rows) < 35
    rare = [Row(name=str(number), cases=["first"], every=2) for number in range(40)]
    assert 5 < sum(row.taken(5) is None for row in rare) < 35


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
    assert rotation_of_today(with_history, {}) == 3
    git(with_history, "checkout", "-b", "a-change-in-two-commits")
    for _ in range(2):
        git(with_history, "commit", "--allow-empty", "--message", "a part of it")
    git(with_history, "checkout", "-")
    git(with_history, "merge", "--no-ff", "--message", "merged", "a-change-in-two-commits")
    assert rotation_of_today(with_history, {}) == 4
    assert rotation_of_today(shallow, {}) == rotation_of_today(without, {}) > 700_000, "the day"


@pytest.mark.parametrize("name", RUN_NUMBERS)
def test_a_ci_that_counts_its_runs_decides(name: str, tmp_path: Path) -> None:
    assert rotation_of_today(tmp_path, {name: "17"}) == 17
    assert rotation_of_today(tmp_path, {name: ""}) > 700_000
