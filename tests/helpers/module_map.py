"""The module map of docs/architecture.md: every module with the first sentence of its docstring.

python -m tests.helpers.module_map        writes it
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.helpers.generated_parts import write
from tests.helpers.sources import ROOT

PAGE = ROOT / "docs/architecture.md"
BEGIN = "<!-- the module map, from the docstrings -->"


def module_map() -> str:
    """A table per package, in the order of the names."""
    return "\n\n".join(
        "\n".join(
            [f"| `{package}` | |", "|---|---|", *(f"| `{path.name}` | {_first_sentence(path)} |" for path in paths)]
        )
        for package, paths in groupby(_modules(), key=lambda path: path.parent.relative_to(ROOT).as_posix())
    )


def _modules() -> Iterator[Path]:
    folders = (ROOT / "hetero", ROOT / "megatron/pretrain", ROOT / "tools")
    found = [path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]
    yield from sorted(found, key=lambda path: (path.parent.as_posix(), path.name))


def _first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.match(r"(.+?[.?])(?= [A-Z]|$)", text)
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence[1] if sentence else text)
    return plain.replace("``", "`").replace("|", "\\|")


def main() -> None:
    write(PAGE, {BEGIN: module_map()})


if __name__ == "__main__":
    main()
