"""The faults can be planted, and the page says of each which test finds it."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.planted_faults import table
from tests.planted_faults.catalogue import FAULTS
from tests.planted_faults.fault import ROOT, Fault, FaultError
from tests.planted_faults.trial import Verdict


def name(fault: Fault) -> str:
    return fault.name.replace(" ", "-")


@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_a_fault_has_its_place_and_is_a_program(fault: Fault) -> None:
    text = fault.planted()
    assert text != (ROOT / fault.file).read_text(encoding="utf-8")
    if fault.file.endswith(".py"):
        compile(text, fault.file, "exec")
    else:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_hinted_files_are_there() -> None:
    assert [fault.name for fault in FAULTS if not fault.hints] == []
    hints = {hint for fault in FAULTS for hint in fault.hints}
    assert [hint for hint in sorted(hints) if not (ROOT / hint).is_file()] == []


def test_there_are_many_of_many_kinds() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert len({fault.kind for fault in FAULTS}) >= 15


@pytest.mark.parametrize(
    ("text", "message"), [("a = 1\n", "0 times"), ("b = 2\nb = 2\n", "2 times"), (None, "there is no file")]
)
def test_a_fault_whose_place_has_changed_is_an_error(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "file").write_text(text)
    lost = Fault(name="lost", kind="wrong scale", file="file", find="b = 2", replace="b = 3", hints=("tests",))
    with pytest.raises(FaultError, match=message):
        lost.planted(tmp_path)


def test_the_page_has_a_row_per_fault_and_none_that_was_not_found() -> None:
    rows = table.written_rows()
    assert list(rows) == [fault.name for fault in FAULTS], "run python -m tests.planted_faults --new --write"
    for fault in FAULTS:
        found = f"| {fault.name} | {fault.kind} | `{fault.file}` | `tests/"
        assert rows[fault.name].startswith(found), rows[fault.name]


def test_a_row_names_the_test_and_survives_bars_in_its_name() -> None:
    verdict = Verdict(fault=FAULTS[0], found_by="tests/a.py::test[tp-2|1]", seconds=3.4, hinted=False)
    assert re.fullmatch(r"\| .* \| `tests/a.py::test\[tp-2/1\]` \(whole suite\) \| 3 \|", table.row(verdict))
