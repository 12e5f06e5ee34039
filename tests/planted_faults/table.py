"""The table of faults and of the tests that find them, in ``docs/planted_faults.md``."""

from collections.abc import Iterable

from tests.planted_faults.catalogue import FAULTS
from tests.planted_faults.fault import ROOT
from tests.planted_faults.trial import Verdict

PAGE = ROOT / "docs" / "planted_faults.md"
BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"
HEAD = ("| fault | kind | where | found by | s |", "|---|---|---|---|---|")
NOT_FOUND = "**not found**"


def row(verdict: Verdict) -> str:
    """One line of the table."""
    fault = verdict.fault
    found = NOT_FOUND if verdict.found_by is None else f"`{verdict.found_by.replace('|', '/')}`"
    if verdict.found_by is not None and not verdict.hinted:
        found += " (whole suite)"
    return f"| {fault.name} | {fault.kind} | `{fault.file}` | {found} | {verdict.seconds:.0f} |"


def written_rows() -> dict[str, str]:
    """The rows of the page by the names of their faults."""
    lines = _inside(PAGE.read_text(encoding="utf-8")).splitlines()
    rows = [line for line in lines if line.startswith("| ") and line != HEAD[0]]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows}


def write(verdicts: Iterable[Verdict]) -> None:
    """Put the rows of ``verdicts`` into the page; those of other faults stay, those of faults that are no more go."""
    rows = written_rows() | {verdict.fault.name: row(verdict) for verdict in verdicts}
    table = [*HEAD, *(rows[fault.name] for fault in FAULTS if fault.name in rows)]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(_inside(text), "\n".join(["", "", *table, "", ""])), encoding="utf-8")


def _inside(text: str) -> str:
    return text.partition(BEGIN)[2].partition(END)[0]
