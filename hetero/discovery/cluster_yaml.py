"""Writes a described cluster as YAML, with remarks as comments where they belong."""

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from hetero.discovery.described import DescribedCluster, Remark
from hetero.printable import printable_lines
from hetero.spec.cluster import NodePair
from hetero.spec.link import Link

WIDTH = 110

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")
_WORDS_OF_YAML = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
"""That are no text in YAML 1.1, in any case."""

_LABELS = {"found": "", "assumed": "ASSUMED: ", "unknown": "NOT FOUND OUT: "}


def cluster_yaml(found: DescribedCluster, *, heading: str) -> str:
    """The cluster as YAML, which loads as ``found.cluster``.

    Args:
        heading: a sentence or two that stand above it.
    """
    lines = [*_comment(heading), *_comments(found.remarks, ()), *_fields(found, found.cluster, (), indent="")]
    return "\n".join(lines) + "\n"


def _fields(found: DescribedCluster, value: Any, place: tuple[str, ...], *, indent: str) -> Iterator[str]:
    """The lines of a dataclass: its fields that are not as they are by default, in their order, under their remarks."""
    for field in dataclasses.fields(value):
        here, each = (*place, field.name), getattr(value, field.name)
        remarks = [f"{indent}{line}" for line in _comments(found.remarks, here)]
        if each == _default(field):
            yield from remarks
            continue
        if not place:
            yield ""
        yield from remarks
        if isinstance(each, Link):
            yield f"{indent}{field.name}: {_flow(each)}"
        elif dataclasses.is_dataclass(each):
            yield f"{indent}{field.name}:"
            yield from _fields(found, each, here, indent=f"{indent}  ")
        elif isinstance(each, tuple) and dataclasses.is_dataclass(each[0]):
            yield f"{indent}{field.name}:"
            for item in each:
                yield from _item(found, item, (*here, _name(item)), indent=f"{indent}  ")
        elif isinstance(each, tuple):
            words = f"{field.name}: [{', '.join(map(_scalar, each))}]"
            yield from _wrapped(words, first=indent, others=f"{indent}  ")
        else:
            yield f"{indent}{field.name}: {_scalar(each)}"


def _item(found: DescribedCluster, item: Any, place: tuple[str, ...], *, indent: str) -> Iterator[str]:
    """The lines of an entry of a list, whose dash stands before its first field."""
    yield from (f"{indent}{line}" for line in _comments(found.remarks, place))
    first, *rest = _fields(found, item, place, indent=f"{indent}  ")
    yield f"{indent}- {first.lstrip()}"
    yield from rest


def _name(item: Any) -> str:
    return " ".join(item.node_types) if isinstance(item, NodePair) else str(item.name)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # HostProfile's version of the format goes with it, as host files have it.
    return field.default


def _comments(remarks: Sequence[Remark], place: tuple[str, ...]) -> list[str]:
    lines: list[str] = []
    for remark in remarks:
        if remark.place == place:
            how = f" Find out: {remark.todo}" if remark.todo else ""
            lines += _comment(f"{_LABELS[remark.kind]}{remark.text}{how}")
    return lines


def _comment(text: str) -> list[str]:
    # YAML knows ends of lines that are no space to textwrap.
    text = printable_lines(text)
    return _wrapped(text, first="# ", others="# ")


def _wrapped(text: str, *, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _flow(link: Link) -> str:
    return f"{{bandwidth_gb_per_s: {_scalar(link.bandwidth_gb_per_s)}, latency_us: {_scalar(link.latency_us)}}}"


def _scalar(value: Any) -> str:
    """As YAML 1.1 and 1.2 read it alike; JSON is both, but for names that nobody would quote."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, ensure_ascii=not str(value).isprintable())
