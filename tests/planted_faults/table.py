"""The table of faults and of the tests that find them, in ``docs/planted_faults.md``."""

from collections.abc import Iterable

from tests.planted_faults.catalogue import FAULTS
from tests.planted_faults.fault import ROOT, Fault
from tests.planted_faults.trial import Verdict

PAGE = ROOT / "docs" / "planted_faults.md"
BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"
HEAD = ("| fault | kind | where | found by | s |", "|---|---|---|---|---|")
NOT_FOUND = "**not found**"
NOT_TRIED = "not tried yet | |"


def row(verdict: Verdict) -> str:
    """One line of the table."""
    return _row(verdict.fault, _outcome(verdict))


def written_rows() -> dict[str, str]:
    """The rows of the page by the names of their faults."""
    lines = _inside(PAGE.read_text(encoding="utf-8")).splitlines()
    return {
        line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ") and line != HEAD[0]
    }


def write(verdicts: Iterable[Verdict]) -> None:
    """Put ``verdicts`` into the page. What it says of other faults stays, but for where they are now; rows of faults
    that are no more go, and new ones say that they are."""
    outcomes = {name: " | ".join(line.rsplit(" | ", 2)[1:]) for name, line in written_rows().items()}
    outcomes |= {verdict.fault.name: _outcome(verdict) for verdict in verdicts}
    table = [*HEAD, *(_row(fault, outcomes.get(fault.name, NOT_TRIED)) for fault in FAULTS)]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *table, "", f"{END}{after}"]), encoding="utf-8")


def is_untried(fault: Fault) -> bool:
    """Nobody has seen yet who finds ``fault``."""
    return written_rows().get(fault.name, NOT_TRIED).endswith(NOT_TRIED)


def _row(fault: Fault, outcome: str) -> str:
    return f"| {fault.name} | {fault.kind} | `{fault.file}` | {outcome}"


def _outcome(verdict: Verdict) -> str:
    """The last two columns: who found it, and after how long."""
    found = NOT_FOUND if verdict.found_by is None else f"`{verdict.found_by.replace('|', '/')}`"
    if verdict.found_by is not None and not verdict.hinted:
        found += " (whole suite)"
    return f"{found} | {verdict.seconds:.0f} |"


def _inside(text: str) -> str:
    return text.partition(BEGIN)[2].partition(END)[0]
