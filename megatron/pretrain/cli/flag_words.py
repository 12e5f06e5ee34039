"""Cuts a command line into flags with their values, before anything is known of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class FlagWords:
    """Holds a flag as the command line has it, and the words up to the next flag.

    joined: the first value stands in the same word, behind "=".
    """

    name: str = ""
    joined: bool = False
    values: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[str]:
        """The words as they stand in the command line."""
        if self.joined:
            return [f"{self.name}={self.values[0]}", *self.values[1:]]
        return [self.name, *self.values] if self.name else self.values


def cut_by_flag(argv: Sequence[str]) -> Iterator[FlagWords]:
    """Cut the command line in front of every flag; what stands in front of the first one has no name."""
    words = FlagWords()
    for token in argv:
        if not token.startswith("-") or token == "-" or _is_number(token):
            words.values.append(token)
            continue
        if words.name or words.values:
            yield words
        name, equals, value = token.partition("=")
        words = FlagWords(name, bool(equals), [value] if equals else [])
    if words.name or words.values:
        yield words


def surplus_value(words: FlagWords, most: float) -> str | None:
    """Say what is wrong if a flag that takes up to ``most`` values has more; ``None`` if it has not."""
    surplus = words.values[1 if words.joined and most else int(min(most, len(words.values))) :]
    if not surplus:
        return None
    if not most:
        return f"{words.name} takes no value, found {surplus[0]!r}"
    return (
        f"unexpected {surplus[0]!r} after the value of {words.name}, which takes one: leave it out, or put the name of "
        "its flag in front of it"
    )


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
