"""Parts of pages that are made from the code: each follows a line that names it, and a line ends it."""

from collections.abc import Iterable, Mapping
from pathlib import Path

END = "<!-- end of what is made from the code -->"


def written(page: Path, begin: str) -> str:
    """Return the part of ``page`` that follows the line ``begin``."""
    _, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return rest.partition(END)[0].strip()


def write(page: Path, parts: Mapping[str, str]) -> None:
    """Replace the ``parts`` of ``page``, by the lines that they follow."""
    text = page.read_text(encoding="utf-8")
    for begin, part in parts.items():
        head, found, rest = text.partition(begin)
        assert found, f"{page} has no line {begin}"
        text = f"{head}{begin}\n\n{part}\n\n{END}{rest.partition(END)[2]}"
    page.write_text(text, encoding="utf-8")


def table_row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
