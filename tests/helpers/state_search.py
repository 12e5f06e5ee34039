"""What searches through the states of a protocol have in common."""

from collections.abc import Mapping
from typing import TypeVar

S = TypeVar("S")


def trace(parents: Mapping[S, tuple[S, str] | None], state: S) -> list[str]:
    """The events that led to a state.

    Args:
        parents: by state, the one from which it was reached first and by which event; ``None`` for the first of all.
    """
    events = []
    while (before := parents[state]) is not None:
        state, label = before
        events.append(label)
    return events[::-1]
