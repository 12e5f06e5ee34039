"""Wording shared by messages and tables."""

from collections.abc import Iterable


def number_ranges(numbers: Iterable[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6; the order stays, so 1, 0 is ``1,0``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
