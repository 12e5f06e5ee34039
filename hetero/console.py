"""The console that tables and lines are printed on: what names and paths have in them is printed as it is."""

from rich.console import Console

PAGE_COLUMNS = 120
"""Width of a table that no terminal limits."""


def console(*, stderr: bool = False, width: int = PAGE_COLUMNS, highlight: bool = True) -> Console:
    """Make a console as wide as the terminal, or ``width`` columns wide if there is none.

    Markup and emoji codes are left alone: a host may be called ``rack[a]``, which Rich would take for a style.
    """
    found = Console(stderr=stderr, markup=False, emoji=False, highlight=highlight)
    if not found.is_terminal:
        found.width = width
    return found
