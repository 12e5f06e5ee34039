"""Ways to damage a file, by what is done to it. All draw from the generator that they are given and from no other.

``MUTATIONS`` has for each name of the table the functions that do it; each takes the bytes of a file and returns
others, or raises :class:`DoesNotApply`, as for keys of a file that has none.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

HUGE_TEXTS = (
    "9" * 5000,
    "1" + "0" * 18,
    "1" + "0" * 15,
    "9223372036854775808",
    "1e999",
    "1e300",
    "-1",
    "-9223372036854775809",
    "0",
    "0.5",
    "NaN",
    "1e-320",
    "1000000000",
)
HUGE_BYTES = tuple(number.to_bytes(8, "little") for number in (2**64 - 1, 2**63, 2**62, 10**15, 2**40, 2**31, 0))

_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")


class DoesNotApply(Exception):
    """This file has nothing that could be damaged so."""


def flip(content: bytes, draw: random.Random) -> bytes:
    """One to four bits."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.choice([0, 1, draw.randrange(len(content)), len(content) - draw.randint(1, 16)])]


def drop_bytes(content: bytes, draw: random.Random) -> bytes:
    start, end = _span(content, draw)
    return content[:start] + content[end:]


def double_bytes(content: bytes, draw: random.Random) -> bytes:
    start, end = _span(content, draw)
    return content[:end] + content[start:end] + content[end:]


def move_bytes(content: bytes, draw: random.Random) -> bytes:
    start, end = _span(content, draw)
    rest = content[:start] + content[end:]
    to = draw.randrange(len(rest) + 1)
    return rest[:to] + content[start:end] + rest[to:]


def huge_bytes(content: bytes, draw: random.Random) -> bytes:
    """A number of eight bytes, wherever it falls; the first bytes are the likelier, headers are there."""
    start = draw.randrange(draw.choice([64, len(content)]))
    return content[:start] + draw.choice(HUGE_BYTES) + content[start + 8 :]


def huge_number(content: bytes, draw: random.Random) -> bytes:
    text = _text(content)
    found = list(_NUMBER.finditer(text))
    if not found:
        raise DoesNotApply
    number = draw.choice(found)
    return (text[: number.start()] + draw.choice(HUGE_TEXTS) + text[number.end() :]).encode()


def drop_line(content: bytes, draw: random.Random) -> bytes:
    lines = _lines(content)
    del lines[draw.randrange(len(lines))]
    return "".join(lines).encode()


def double_line(content: bytes, draw: random.Random) -> bytes:
    lines = _lines(content)
    at = draw.randrange(len(lines))
    return "".join([*lines[: at + 1], *lines[at:]]).encode()


def move_line(content: bytes, draw: random.Random) -> bytes:
    lines = _lines(content)
    line = lines.pop(draw.randrange(len(lines)))
    lines.insert(draw.randrange(len(lines) + 1), line)
    return "".join(lines).encode()


def nest(content: bytes, draw: random.Random) -> bytes:
    """A number becomes a list of lists, or aliases that stand for more than memory holds."""
    text = _text(content)
    found = list(_NUMBER.finditer(text))
    if not found:
        raise DoesNotApply
    number = draw.choice(found)
    laughs = "".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}], " for i in range(1, 10))
    bombs = ["[" * 100_000, "[" * 100 + "1" + "]" * 100, '{"a":' * 5000, f"[&a0 [1, 1], {laughs}]"]
    return (text[: number.start()] + draw.choice(bombs) + text[number.end() :]).encode()


def drop_key(content: bytes, draw: random.Random) -> bytes:
    tree = _tree(content)
    pairs = draw.choice(list(_objects(tree)))
    del pairs.pairs[draw.randrange(len(pairs.pairs))]
    return _written(tree).encode()


def double_key(content: bytes, draw: random.Random) -> bytes:
    """The same key again, with its own value or with another's."""
    tree = _tree(content)
    pairs = draw.choice(list(_objects(tree))).pairs
    key, _ = draw.choice(pairs)
    pairs.append((key, draw.choice(pairs)[1]))
    return _written(tree).encode()


def move_key(content: bytes, draw: random.Random) -> bytes:
    """A key with its value into another object, or two values into each other's place."""
    tree = _tree(content)
    objects = list(_objects(tree))
    ours, theirs = draw.choice(objects).pairs, draw.choice(objects).pairs
    i, j = draw.randrange(len(ours)), draw.randrange(len(theirs))
    if draw.random() < 0.5:
        (key, value), (other, others) = ours[i], theirs[j]
        ours[i], theirs[j] = (key, others), (other, value)
    elif ours is not theirs:
        theirs.append(ours.pop(i))
    # An object that went into one of its own values is gone with it.
    return _written(tree).encode()


def retype(content: bytes, draw: random.Random) -> bytes:
    tree = _tree(content)
    pairs = draw.choice(list(_objects(tree))).pairs
    i = draw.randrange(len(pairs))
    pairs[i] = (pairs[i][0], draw.choice([None, True, "", "4", [], [None], {}, -1, 0, 1.5, "\ud800", [[]], 10**30]))
    return _written(tree).encode()


MUTATIONS: Mapping[str, tuple[Mutation, ...]] = {
    "bytes flipped": (flip,),
    "truncated": (truncate,),
    "dropped": (drop_bytes, drop_line, drop_key, drop_key),
    "doubled": (double_bytes, double_line, double_key, double_key),
    "moved": (move_bytes, move_line, move_key, move_key),
    "numbers huge": (huge_bytes, huge_number, huge_number, huge_number),
    "nested, retyped": (nest, retype, retype),
}
"""By the rows of the table. What does not apply to a file, such as keys to a binary one, is left out of the draw."""

TEXT = frozenset({drop_line, double_line, move_line, huge_number, nest})
JSON = frozenset({drop_key, double_key, move_key, retype})


def in_header(mutation: Mutation) -> Mutation:
    """``mutation`` of the JSON header of a safetensors file, whose length is made right."""

    def mutate(content: bytes, draw: random.Random) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        header = mutation(content[8:end], draw)
        return len(header).to_bytes(8, "little") + header + content[end:]

    return mutate


class _Object:
    """A JSON object as a list of pairs, which may repeat a key."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _tree(content: bytes) -> Any:
    try:
        return json.loads(_text(content), object_pairs_hook=_Object)
    except json.JSONDecodeError:
        raise DoesNotApply from None


def _objects(tree: Any) -> Iterator[_Object]:
    if isinstance(tree, _Object):
        if tree.pairs:
            yield tree
        for _, value in tree.pairs:
            yield from _objects(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _objects(value)


def _written(tree: Any, within: tuple[int, ...] = ()) -> str:
    """JSON of ``tree``, a line per key; what contains itself is written once."""
    if id(tree) in within:
        return "{}"
    inside = (*within, id(tree))
    if isinstance(tree, _Object):
        return "{" + ",\n".join(f"{json.dumps(key)}: {_written(value, inside)}" for key, value in tree.pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(_written(value, inside) for value in tree) + "]"
    return json.dumps(tree)


def _span(content: bytes, draw: random.Random) -> tuple[int, int]:
    start = draw.randrange(len(content))
    length = draw.choice([1, 4, 8, draw.randint(1, 64), draw.randint(1, len(content))])
    return start, min(start + length, len(content))


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise DoesNotApply from None


def _lines(content: bytes) -> list[str]:
    lines = _text(content).splitlines(keepends=True)
    if len(lines) < 2:
        raise DoesNotApply
    return lines
