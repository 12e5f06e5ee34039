"""Formats numbers for messages and tables: ranges of ranks, and layers of which there may be halves."""

from collections.abc import Iterable, Sequence


def number_ranges(numbers: Iterable[int]) -> str:
    """Formats numbers as ranges: ``0-3,6`` for 0, 1, 2, 3, 6; the order stays, so 1, 0 is ``1,0``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Formats one or several of a kind: ``rank 3``, or ``ranks 0-3,6``."""
    return f"{what}{'s' if len(numbers) > 1 else ''} {number_ranges(numbers)}"


def in_halves(number: float) -> str:
    """Formats a number of layers, of which stages may hold halves: ``3``, ``3½`` or ``½``."""
    whole, has_half = int(number), number % 1 > 0
    return f"{whole or '' if has_half else whole}{'½' if has_half else ''}"
