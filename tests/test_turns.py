"""What a run takes of cases that rotate, and what it says of the others."""

from pathlib import Path

import pytest

from tests.helpers.small_suite import run_suite, small_suite

TESTS = """
import pytest

@pytest.mark.parametrize("number", [pytest.param(each, marks=pytest.mark.rotates("numbers")) for each in range(4)])
def test_of_a_row(number):
    print(f"takes number {number}")

@pytest.mark.rotates(every=3, turn=2)
@pytest.mark.parametrize("number", range(2))
def test_of_each_third_run(number):
    pass

def test_of_every_run():
    pass
"""
WAIT = "cases had no turn; 3 runs in a row take some of every row, 4 take every case"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--rotation", "2"), ["4 passed, 3 deselected", f"rotation 2: 3 {WAIT}"]),
        (("--rotation", "3", "--share-files=."), ["2 passed", f"rotation 3: 5 {WAIT}"]),
        (("--in-every-run",), ["1 passed, 6 deselected"]),
        (("--all",), ["7 passed in"]),
    ],
    ids=["its turn", "not its turn, by files", "in every run", "all"],
)
def test_the_summary_says_how_many_cases_had_no_turn(options: tuple[str, ...], says: list[str], tmp_path: Path) -> None:
    (small_suite(tmp_path) / "tests" / "test_file.py").write_text(TESTS)
    ran = run_suite(tmp_path, *options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [each for each in says if each not in ran.stdout] == [], ran.stdout
    assert ("had no turn" in ran.stdout) == any("had no turn" in each for each in says)
