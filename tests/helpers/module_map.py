"""The module map of docs/architecture.md: every module with the first sentence of its docstring.

python -m tests.helpers.module_map        writes it anew
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- the module map, from the docstrings -->", "<!-- end of the module map -->"


def module_map() -> str:
    """A table per package, in the order of the names."""
    return "\n\n".join(
        "\n".join(
            [f"| `{package}` | |", "|---|---|", *(f"| `{path.name}` | {_first_sentence(path)} |" for path in paths)]
        )
        for package, paths in groupby(_modules(), key=lambda path: path.parent.relative_to(ROOT).as_posix())
    )


def written() -> str:
    """What the page has of it."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return rest.partition(END)[0].strip()


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
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{module_map()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
