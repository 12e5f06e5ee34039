"""The glossary names what is there, and the page of old names what is there in their place."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT

GLOSSARY, RENAMED = ROOT / "docs/glossary.md", ROOT / "docs/renamed.md"
BELOW = ROOT / "hetero"


def exists(dotted: str, *, below: Path) -> bool:
    """Whether ``dotted`` is a package or module below a folder, or a class, function, constant or field in one."""
    path, parts = below, dotted.split(".")
    while parts and (path / parts[0]).is_dir():
        path, parts = path / parts[0], parts[1:]
    if not parts:
        return (path / "__init__.py").is_file()
    module = path / f"{parts[0]}.py"
    if not module.is_file():
        return False
    body: list[ast.stmt] | None = statements(module)
    for part in parts[1:]:
        found = next((node for node in body or () if part in names_of(node)), None)
        if found is None:
            return False
        body = found.body if isinstance(found, ast.ClassDef) else None
    return True


@cache
def statements(module: Path) -> list[ast.stmt]:
    """Of a module, parsed once for all of its names."""
    return ast.parse(module.read_text(encoding="utf-8")).body


def names_of(node: ast.stmt) -> set[str]:
    """What a statement of a module or class defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def rows(page: Path, *, last: str) -> Iterator[list[str]]:
    """The cells of all rows of the page's tables whose last column is headed ``last``."""
    heading = None
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            heading = None
        elif heading is None:
            heading = cells[-1]
        elif heading == last and set(line) - set("|-: "):
            yield cells


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_what_the_glossary_names_exists() -> None:
    named = [(cells[0], code_in(cells[-1])) for cells in rows(GLOSSARY, last="in the code")]
    assert len(named) > 50
    assert [term for term, code in named if not code] == []
    assert [each for _, code in named for each in code if not exists(each, below=BELOW)] == []


def test_old_names_are_gone_and_new_ones_there() -> None:
    renamed = [(code_in(old), code_in(new)) for old, new in rows(RENAMED, last="new name")]
    assert len(renamed) > 50
    assert [each for _, new in renamed for each in new if not exists(each, below=BELOW)] == []
    # A module may have become a package of the same name.
    still_there = [old for (old,), (new,) in renamed if exists(old, below=BELOW) and not new.startswith(f"{old}.")]
    assert still_there == []


def test_terms_are_explained_once() -> None:
    terms = [term for cells in rows(GLOSSARY, last="in the code") for term in re.split(r"[,;] ", cells[0])]
    assert sorted(set(terms)) == sorted(terms)


@pytest.mark.parametrize(
    ("dotted", "found"),
    [
        ("plan", True),
        ("plan.ir", True),
        ("plan.ir.Stage", True),
        ("plan.ir.Stage.in_flight", True),
        ("plan.ir.Replica.device_groups", True),
        ("schedule.actions.COMPUTE", True),
        ("plans", False),
        ("plan.irr", False),
        ("plan.ir.Stages", False),
        ("plan.ir.Stage.depth", False),
        ("schedule.actions.COMPUTE.F", False),
    ],
)
def test_names_are_looked_up(dotted: str, found: bool) -> None:
    assert exists(dotted, below=BELOW) is found
