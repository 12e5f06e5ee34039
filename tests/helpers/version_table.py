"""The tables of docs/install.md: combinations of versions that were run, and those that are known to break.

python -m tests.helpers.version_table        writes them
"""

from collections.abc import Callable, Iterator, Sequence

from hetero.data.tried_versions import RUN_KINDS, VersionTable, shipped_versions
from hetero.installed_versions import COMPONENTS, NAMES
from tests.helpers.generated_parts import table_row, write
from tests.helpers.sources import ROOT

PAGE = ROOT / "docs/install.md"


def tried_table(versions: VersionTable) -> str:
    """Return a line per run, in the order of the file, with a column per component that any of them has."""
    shown = [component for component in COMPONENTS if any(tried.version_of(component) for tried in versions.tried)]
    return _table(
        [*(NAMES[component] for component in shown), "what was run", "where and when", "result"],
        (
            [
                *(tried.version_of(component) or "none" for component in shown),
                *(f"{run.kind}: `{run.command}`", f"{run.device}, {run.date}", run.result),
            ]
            for tried in versions.tried
            for run in tried.runs
        ),
    )


def kinds_table(versions: VersionTable) -> str:
    """Return a line per kind of run that the table has."""
    used = {run.kind for tried in versions.tried for run in tried.runs}
    return _table(["what was run", "what it is"], ([kind, text] for kind, text in RUN_KINDS.items() if kind in used))


def breaking_table(versions: VersionTable) -> str:
    """Return a line per combination that is known to break."""
    return _table(
        ["versions", "why", "what to do", "seen", "command"],
        (
            [str(breaking), breaking.because, breaking.fix, breaking.date, f"`{breaking.command}`"]
            for breaking in versions.breaking
        ),
    )


TABLES: dict[str, Callable[[VersionTable], str]] = {
    "<!-- combinations that were run, from hetero/data/tried_versions.yaml -->": tried_table,
    "<!-- kinds of runs, from hetero/data/tried_versions.py -->": kinds_table,
    "<!-- combinations that break, from hetero/data/tried_versions.yaml -->": breaking_table,
}
"""The lines of the page that the tables follow."""


def _table(heads: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(map(table_row, lines))


def main() -> None:
    write(PAGE, {begin: table(shipped_versions()) for begin, table in TABLES.items()})


if __name__ == "__main__":
    main()
