"""Kinds of flag: how the text of a value becomes the value, and what is said of one that cannot."""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.serialization import near_match


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How a flag's text becomes a value; ``parse`` raises ValueError for text that is not ``limit``.

    shown: what stands for the value in ``--help``.
    """

    shown: str
    limit: str
    parse: Callable[[str], Any]
    choices: tuple[str, ...] = ()

    def __call__(self, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError:
            hint = near_match(text, list(self.choices))
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.limit}{hint}") from None


def integer(minimum: int) -> Kind:
    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise ValueError
        return value

    return Kind(shown="N", limit=f"a whole number of at least {minimum}", parse=parse)


def number(limit: str, accepts: Callable[[float], bool]) -> Kind:
    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and accepts(value)):
            raise ValueError
        return value

    return Kind(shown="X", limit=limit, parse=parse)


def text(shown: str, convert: Callable[[str], Any] = str) -> Kind:
    # An empty text is an unset variable of the calling script; as a path it would mean the current folder.
    def parse(text: str) -> Any:
        if not text.strip():
            raise ValueError
        return convert(text)

    return Kind(shown=shown, limit="a name; is a variable of the script empty?", parse=parse)


def one_of(*choices: str) -> Kind:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return Kind(shown="{" + ",".join(choices) + "}", limit=f"one of {', '.join(choices)}", parse=parse, choices=choices)


def only(value: str, why: str) -> Kind:
    """A flag that scripts carry along and that has one legal value."""

    def parse(text: str) -> str:
        if text != value:
            raise ValueError
        return text

    return Kind(shown=f"{{{value}}}", limit=f"{value}, the only value supported: {why}", parse=parse)


def _parse_split(text: str) -> str:
    shares = text.split(",")
    # Plain decimals only: megatron-core reads "1e2" as the two numbers 1 and 2.
    if len(shares) > 3 or not all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", share) for share in shares):
        raise ValueError
    if float(shares[0]) == 0:
        raise ValueError
    return text


SWITCH = Kind(shown="", limit="", parse=str)
COUNT = integer(1)
COUNT_FROM_0 = integer(0)
POSITIVE = number("a number above 0", lambda x: x > 0)
FROM_1 = number("a number of at least 1", lambda x: x >= 1)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
BELOW_1 = number("a number from 0 to below 1", lambda x: 0 <= x < 1)
FRACTION = number("a number above 0 and up to 1", lambda x: 0 < x <= 1)
PATH = text("PATH", Path)
PREFIXES = text("PREFIX")
TOKENIZER = dataclasses.replace(
    one_of("ByteLevelTokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
    limit="ByteLevelTokenizer, HuggingFaceTokenizer (which reads any model's tokenizer.json) or NullTokenizer",
    choices=(),  # the nearest name to another of Megatron-LM's tokenizers would be a wrong advice
)
SPLIT = Kind(
    shown="SHARES",
    limit="one to three shares with commas between them, the first above 0, such as '969, 30, 1'",
    parse=_parse_split,
)
