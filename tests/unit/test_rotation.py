"""Over the runs every case has its turn, and a run can be had again."""

import subprocess
from pathlib import Path

from tests.dist import test_layouts
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


def test_every_layout_is_in_every_run() -> None:
    """One of its styles, or a case that does not rotate."""
    always, rows = set(), set()
    for case in test_layouts._cases():
        layout = next(name for name, style, _ in test_layouts.LAYOUTS if case.id == f"{name}-{style}")
        row = next((mark.args[0] for mark in case.marks if mark.name == "rotates"), None)
        if row is None:
            always.add(layout)
        else:
            rows.add(row)
    layouts = {name for name, _, _ in test_layouts.LAYOUTS}
    assert layouts - always <= rows
    assert always == {name for name, _ in test_layouts.FAST}


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
    assert rotation_of_today(shallow) == rotation_of_today(without) > 700_000, "the day"
