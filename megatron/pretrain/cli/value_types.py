"""Converts the text of a flag's value: a type for each sort of value, with its limits and its message."""

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Generic, Literal, TypeVar, get_args

from hetero.plan.batch_sizes import BatchSchedule
from hetero.serialization import near_match

T = TypeVar("T")

TokenizerType = Literal[
    "ByteLevelTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "Llama2Tokenizer",
    "GPTSentencePieceTokenizer",
    "SentencePieceTokenizer",
    "NullTokenizer",
]

_OF_SENTENCE_PIECE = {"--tokenizer-model": "a SentencePiece model, or the folder that has its tokenizer.model"}

TOKENIZER_FILES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "HuggingFaceTokenizer": {"--tokenizer-model": "a tokenizer.json, or the folder that has it"},
        "GPT2BPETokenizer": {"--vocab-file": "GPT-2's vocab.json", "--merge-file": "GPT-2's merges.txt"},
        "Llama2Tokenizer": _OF_SENTENCE_PIECE,
        "GPTSentencePieceTokenizer": _OF_SENTENCE_PIECE,
        "SentencePieceTokenizer": _OF_SENTENCE_PIECE,
    }
)
"""By tokenizer, the flags that name its files, and which those are."""


def missing_tokenizer_file(tokenizer_type: str, flag: str) -> str:
    """The words of an error: ``tokenizer_type`` reads the file that ``flag`` would name, and it is not given."""
    return f"--tokenizer-type {tokenizer_type} needs {flag}: {TOKENIZER_FILES[tokenizer_type][flag]}; add it"


MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueType(Generic[T]):
    """Converts a flag's text into its value; ``parse`` raises ValueError for text that is not ``limit``.

    shown: what stands for the value in ``--help``.
    """

    shown: str
    limit: str
    parse: Callable[[str], T]
    choices: tuple[str, ...] = ()

    def __call__(self, text: str) -> T:
        """Convert ``text``, as argparse asks for it.

        Raises:
            argparse.ArgumentTypeError: there is none.
        """
        try:
            return self.parse(text)
        except ValueError:
            hint = near_match(text, list(self.choices))
            shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
            raise argparse.ArgumentTypeError(f"{shown!r} is not {self.limit}{hint}") from None


MOST = 10**12
"""No count of a run is larger: trillions of tokens are billions of samples. torch and numpy count to 9 x 10^18, and
products of two counts stay below that."""


def integer(minimum: int, maximum: int = MOST) -> ValueType[int]:
    """Accept whole numbers from ``minimum`` to ``maximum``."""

    def parse(text: str) -> int:
        value = int(text)
        if not minimum <= value <= maximum:
            raise ValueError
        return value

    return ValueType(shown="N", limit=f"a whole number of at least {minimum} and at most {maximum}", parse=parse)


def or_off(wanted: ValueType[T]) -> ValueType[T | None]:
    """Accept 0 as well, for ``None``: that is how scripts of Megatron-LM switch something off."""

    def parse(text: str) -> T | None:
        try:
            if float(text) == 0:
                return None
        except ValueError:
            pass
        return wanted.parse(text)

    return ValueType(shown=wanted.shown, limit=f"{wanted.limit}, or 0 for none", parse=parse)


def or_empty(wanted: ValueType[T]) -> ValueType[T | None]:
    """Accept an empty text as well, for ``None``, where that is Megatron-LM's default."""
    return ValueType(shown=wanted.shown, limit=wanted.limit, parse=lambda text: wanted.parse(text) if text else None)


def number(limit: str, accepts: Callable[[float], bool]) -> ValueType[float]:
    """Accept finite numbers that ``accepts`` lets pass; ``limit`` puts that into words."""

    def parse(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and accepts(value)):
            raise ValueError
        return value

    return ValueType(shown="X", limit=limit, parse=parse)


def text(shown: str, convert: Callable[[str], T]) -> ValueType[T]:
    """Accept any text but an empty one: that is an unset variable of the script, and as a path the current folder."""

    def parse(text: str) -> T:
        if not text.strip():
            raise ValueError
        return convert(text)

    return ValueType(shown=shown, limit="a name; is a variable of the script empty?", parse=parse)


def one_of(*choices: str) -> ValueType[str]:
    """Accept some names."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return ValueType(
        shown="{" + ",".join(choices) + "}", limit=f"one of {', '.join(choices)}", parse=parse, choices=choices
    )


def only(value: T, why: str) -> ValueType[T]:
    """Accept the one legal value of a flag that scripts carry along."""

    def parse(text: str) -> T:
        if text != str(value):
            raise ValueError
        return value

    return ValueType(shown=f"{{{value}}}", limit=f"{value}, the only value supported: {why}", parse=parse)


def _parse_split(text: str) -> str:
    # Quotes inside a variable of a shell script are no quotes to the shell.
    text = text.strip("'\"")
    shares = text.split(",")
    # Plain decimals only: megatron-core reads "1e2" as the two numbers 1 and 2.
    if len(shares) > 3 or not all(re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*", share) for share in shares):
        raise ValueError
    if not 0 < float(shares[0]) <= sum(map(float, shares)) <= MOST:
        raise ValueError
    return text


_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def _parse_path(text: str) -> Path:
    # As a path, msc://profile/run would be a folder "msc:" on the disk of each host.
    if not text.strip() or _URL.match(text):
        raise ValueError
    return Path(text)


_TOKENS = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:E[+-]?[0-9]+)?)([KMBT]?)", re.IGNORECASE)
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _parse_batch_schedule(text: str) -> BatchSchedule:
    # Quotes inside a variable of a shell script are no quotes to the shell; megatron-core takes commas as well.
    entries = []
    for entry in text.strip("'\"").replace(",", " ").split():
        tokens, _, size = entry.partition(":")
        entries.append((_number_with_suffix(tokens), _number_with_suffix(size)))
    if not entries or any(tokens > MOST * 1000 or not 1 <= size <= MOST for tokens, size in entries):
        raise ValueError
    return BatchSchedule(entries=tuple(sorted(entries)))


def _number_with_suffix(text: str) -> int:
    if (match := _TOKENS.fullmatch(text)) is None:
        raise ValueError
    value = float(match[1]) * _SUFFIXES[match[2].upper()]
    if not math.isfinite(value):
        raise ValueError
    return int(value)


COUNT = integer(1)
COUNT_FROM_0 = integer(0)
POSITIVE = number("a number above 0", lambda x: x > 0)
FROM_1 = number("a number of at least 1", lambda x: x >= 1)
NOT_NEGATIVE = number("a number of at least 0", lambda x: x >= 0)
TIMEOUT_MINUTES = number(
    "a number of minutes from 0.5, in which the ranks of a busy host start, to 10080, a week",
    lambda x: 0.5 <= x <= 7 * 24 * 60,
)
HEARTBEAT_SECONDS = number(
    "a number of seconds from 3, as ranks give one sign a second, to 3600, an hour", lambda x: 3 <= x <= 3600
)
SECONDS = number("a number of seconds from 0.1 to 604800, a week", lambda x: 0.1 <= x <= 7 * 24 * 3600)
TIME_SCALE = number("a number from 0.0001 to 10000", lambda x: 1e-4 <= x <= 1e4)
LOSS_SCALE = number("a number above 0 and up to 2^127, which fp32 holds", lambda x: 0 < x <= 2.0**127)
SEED = integer(0, 2**32 - 1)
PROCESSES = integer(0, 1024)
BELOW_1 = number("a number from 0 to below 1", lambda x: 0 <= x < 1)
FRACTION = number("a number above 0 and up to 1", lambda x: 0 < x <= 1)
FRACTION_FROM_0 = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
PORT = integer(1, 2**16 - 1)
RANKS = dataclasses.replace(COUNT_FROM_0, shown="RANK")
NAME = text("NAME", str)
ADDRESS = text("ADDRESS", str)
PATH = ValueType(
    shown="PATH", limit="a path in a mounted file system; is a variable of the script empty?", parse=_parse_path
)
PATH_AS_GIVEN = text("PATH", str)
PREFIXES = text("PREFIX", str)
TOKENIZER = dataclasses.replace(
    one_of(*get_args(TokenizerType)),
    limit="HuggingFaceTokenizer (which reads any model's tokenizer.json), GPT2BPETokenizer, Llama2Tokenizer, "
    "GPTSentencePieceTokenizer, SentencePieceTokenizer, ByteLevelTokenizer or NullTokenizer",
    choices=(),  # the nearest name to another of Megatron-LM's tokenizers would be a wrong advice
)
BATCH_SCHEDULE = ValueType(
    shown="'TOKENS:SAMPLES ...'",
    limit="one word of TOKENS:SAMPLES pairs in quotes, such as '0:768 250B:1536', where K, M, B and T stand for 10^3, "
    "10^6, 10^9 and 10^12",
    parse=_parse_batch_schedule,
)
SPLIT = ValueType(
    shown="SHARES",
    limit="one to three shares with commas between them, the first above 0, such as '969, 30, 1'",
    parse=_parse_split,
)
