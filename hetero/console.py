"""The console that tables and lines are printed on: names and paths are text, whatever they have in them."""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hetero.printable import PrintableStream, printable_lines

PAGE_COLUMNS = 120
"""Width of a table that no terminal limits."""


class _PrintableConsole(Console):
    """A console whose texts have no control characters of their own; Rich strips some, and not the escape."""

    @property
    def file(self) -> IO[str]:
        """Where it writes: its styles are escape sequences, which a printable stream would show as text."""
        file = super().file
        return file.exact if isinstance(file, PrintableStream) else file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        Console.file.fset(self, new_file)  # type: ignore[attr-defined]  # mypy does not know properties by class

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of ``renderable``; a cell of a table, too, is rendered here before it is cut to size."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=printable_lines(segment.text))


def console(
    *, stderr: bool = False, width: int | None = PAGE_COLUMNS, highlight: bool = True, soft_wrap: bool = False
) -> Console:
    """Make a console as wide as the terminal, or ``width`` columns wide if there is none.

    Markup and emoji codes are left alone: a host may be called ``rack[a]``, which Rich would take for a style. What is
    not printable is shown as escapes.

    Args:
        width: ``None`` for what Rich takes where there is no terminal.
        soft_wrap: leave lines as long as they are.
    """
    found = _PrintableConsole(stderr=stderr, markup=False, emoji=False, highlight=highlight, soft_wrap=soft_wrap)
    if width is not None and not found.is_terminal:
        found.width = width
    return found
