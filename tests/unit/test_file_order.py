"""Files that wait run beside files that compute."""

from pathlib import PurePath

from tests.helpers.file_order import WAITING, in_order
from tests.helpers.sources import ROOT


def test_files_that_wait_are_spread_and_short_ones_come_last() -> None:
    computes = [PurePath("dist", f"test_{i}.py") for i in range(6)]
    waits = [PurePath("elastic", "test_a.py"), PurePath("elastic", "test_b.py"), PurePath("faults", "test_c.py")]
    short = [PurePath("test_docs.py"), PurePath("unit", "plan", "test_d.py")]
    ordered = in_order([*computes, *short, *waits])
    assert ordered == [waits[2], *computes[:2], waits[0], *computes[2:4], waits[1], *computes[4:], *short]


def test_places_that_wait_are_there() -> None:
    assert not [place for place in WAITING if not (ROOT / "tests" / place).exists()]
