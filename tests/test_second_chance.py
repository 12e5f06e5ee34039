"""What failed is run once more if a busy machine can explain it, and only then."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import MOST_SECOND_CHANCES, REAL_TIME
from tests.helpers.small_suite import run_suite, small_suite
from tests.helpers.sources import ROOT

TESTS = """
import pytest
@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    assert {good}
def test_that_did_not_fail():
    assert False
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with this one's rules, and tests of its own."""
    return small_suite(tmp_path)


def run_again(project: Path, place: str, *, count: int = 1, good: bool = True) -> subprocess.CompletedProcess[str]:
    """A second run, after one in which ``count`` tests of a file in ``place`` failed."""
    path = project / "tests" / place / "test_file.py"
    path.parent.mkdir(parents=True)
    path.write_text(TESTS.format(count=count, good=good))
    failed = project / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed.parent.mkdir(parents=True)
    failed.write_text(json.dumps({f"tests/{place}/test_file.py::test_one[{number}]": True for number in range(count)}))
    return run_suite(project, "--second-chance")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "options", "says"),
    [
        ("elastic", {}, (0, "1 passed, 1 deselected")),
        ("elastic", {"good": False}, (1, "1 failed, 1 deselected")),
        ("unit", {}, (4, "time has no part in them: tests/unit/test_file.py::test_one[0]")),
        ("e2e", {"count": MOST_SECOND_CHANCES + 1}, (4, f"more than the {MOST_SECOND_CHANCES} of a busy machine")),
    ],
)
def test_who_has_a_second_chance(place: str, options: dict[str, int], says: tuple[int, str], project: Path) -> None:
    again = run_again(project, place, **options)
    assert again.returncode == says[0], again.stdout + again.stderr
    assert says[1] in again.stdout + again.stderr


def test_places_with_a_second_chance_are_there() -> None:
    missing: Sequence[str] = [place for place in REAL_TIME if not (ROOT / "tests" / place).exists()]
    assert not missing
