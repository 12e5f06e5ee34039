"""The console that tables are printed on."""

from rich.console import Console

WIDTH_IN_A_FILE = 120
"""Columns of a table that no terminal limits."""


def console(*, stderr: bool = False) -> Console:
    """As wide as the terminal, or as a page if there is none."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(width=WIDTH_IN_A_FILE, stderr=stderr)
