"""What is public says in its first sentence what it does."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.sources import SOURCES, name, text

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def first_sentence(docstring: str) -> str:
    """Up to the first period, question or exclamation mark that a space or the end follows, of the first paragraph."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    found = re.match(r".+?[.?!](?= |$)", paragraph)
    return found[0] if found else ""


def problem_of(node: Documented) -> str | None:
    """What is wrong with the docstring of something public, if anything is."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return "has no docstring"
    sentence = first_sentence(docstring)
    if not sentence.endswith("."):
        return "its docstring does not begin with a sentence that ends with a period"
    if len(sentence.split()) < 3:
        return f"its first sentence is {sentence!r}, which says nothing"
    return None


def public_nodes(tree: ast.Module) -> Iterator[tuple[str, Documented]]:
    """The module, its public classes and functions, and those methods of public classes that have a docstring.

    A method may go without: it may be known from its base class, or from its name and type.
    """
    yield "the module", tree
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_") or is_overload(node):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            methods = (
                each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
            )
            yield from ((f"{node.name}.{each.name}", each) for each in methods if ast.get_docstring(each))


def is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """One of several types of a function that says what it does once."""
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


def problems(source: str) -> list[str]:
    tree = ast.parse(source)
    found = [(where, problem_of(node)) for where, node in public_nodes(tree)] if tree.body else []
    return [f"{where}: {problem}" for where, problem in found if problem]


def test_what_is_public_says_what_it_does() -> None:
    found = {name(path): problems(text(path)) for path in SOURCES}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("", []),
        ('"""Counts the sheep."""', []),
        ('"""Counts sheep of pens such as tests/a.py, one by one.\n\nAnd more."""', []),
        ("x = 1", ["the module: has no docstring"]),
        ('"""Units. Plain numbers."""', ["the module: its first sentence is 'Units.', which says nothing"]),
        ('"""Does it fit?"""', ["the module: its docstring does not begin with a sentence that ends with a period"]),
        ('"""Counts the sheep."""\ndef count(): ...', ["count: has no docstring"]),
        ('"""Counts the sheep."""\ndef _count(): ...', []),
        ('"""Counts the sheep."""\n@overload\ndef count(): ...', []),
        ('"""Counts the sheep."""\nclass Pen:\n    """A pen with sheep."""\n    def count(self): ...', []),
        (
            '"""Counts the sheep."""\nclass Pen:\n    """A pen of sheep."""\n    def count(self):\n        """Why?"""',
            ["Pen.count: its docstring does not begin with a sentence that ends with a period"],
        ),
    ],
)
def test_problems_are_found(source: str, found: list[str]) -> None:
    assert problems(source) == found
