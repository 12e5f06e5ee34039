"""Puts docstrings as they are written here into Markdown: roles as code, and fields with their text as a list."""

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(?P<names>\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): ", re.MULTILINE)
"""The beginning of what a docstring says of a field: its name, or several."""


def in_markdown(docstring: str) -> str:
    """The text of a docstring as Markdown."""
    text = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", docstring).replace("``", "`")
    return "\n\n".join(_with_fields(paragraph) for paragraph in text.split("\n\n"))


def _with_fields(paragraph: str) -> str:
    """Make a list of a paragraph that begins with a field."""
    if FIELD.match(paragraph) is None:
        return paragraph
    return FIELD.sub(lambda field: f"- `{field['names'].replace(', ', '`, `')}`: ", paragraph)


class DocstringsInMarkdown(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
