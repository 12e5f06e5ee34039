"""Reads and writes frozen dataclasses as JSON and YAML, and checks every key, type and name on the way in.

Unknown keys are refused with the near match, repeated ones too. Humans write YAML, machines write JSON; both load
through the same strict check of types, so ``"4"`` is not 4.

This is the one place that reads a file which a user named as text, JSON or YAML. A file may be damaged or made to
harm: what it may cost is limited before it is read or parsed, and whatever is wrong is a :class:`ConfigError` that
names it.
"""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hetero.errors import ConfigError
from hetero.file_kinds import wrong_kind
from hetero.format_versions import upgraded
from hetero.output_files import write_bytes
from hetero.printable import printable
from hetero.printable_fields import check_fields
from hetero.units import MIB

T = TypeVar("T")

MAX_FILE_BYTES = 256 * MIB
"""Of a file that is read at once. The manifest of a checkpoint of a million blocks has 160 MB, the ``tokenizer.json``
of Gemma, with 262,000 tokens, 33 MB; all other files are smaller by far."""

MAX_YAML_BYTES = MIB
"""Humans write YAML: six thousand node types fit. PyYAML needs some 5 s for as much; JSON takes the rest."""

MAX_YAML_VALUES = 200_000
"""Aliases counted as what they stand for: a dozen lines of them can say a billion values."""

MAX_DEPTH = 64
"""Levels of lists and objects in each other. No file of ours has more than 8, no configuration of a model more."""

MAX_DIGITS = 40
"""Of a whole number. The longest in use, transformers' "no limit", has 31; as a float 40 digits are far from
infinite, and so are products of several of them."""

_MAX_SHOWN = 80
"""Characters of a wrong value that a message repeats."""

_MAX_PROBLEMS = 5
"""That a message lists; the rest are counted."""

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Assign to ``__pydantic_config__`` of every dataclass that is read from a file."""

_INT, _FLOAT, _TIMESTAMP = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))

_DECIMAL = r"(0|[1-9][0-9]*(_[0-9]+)*)"


_UNFIT = object()
_EMPTY = "it is empty; is it the right file, and was it written to its end?"


class _UnfitError(ValueError):
    """A value of a file is beyond a limit, or cannot be meant."""


class _UnfitNumberError(_UnfitError):
    """The same of a number."""


class _YamlLoader(yaml.SafeLoader):
    """Reads YAML with the numbers of YAML 1.2.

    PyYAML speaks YAML 1.1, in which ``1e-5`` is a text, ``012`` is ten, ``1:30`` is ninety and ``2024-01-31`` no
    text; here numbers are decimal, as they look (``1_000`` too), and the rest is text, which no number's field takes.

    A key that a mapping has twice is refused: PyYAML would take the last one and say nothing.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_values = 0
        self._values_of: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # not in the stubs of PyYAML
        before = self._num_values
        is_alias = isinstance(event, yaml.AliasEvent)
        self._num_values += self._values_of.get(event.anchor, 1) if is_alias else 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _UnfitError(f"line {event.start_mark.line + 1}: {_too_deep()}")
        if self._num_values > MAX_YAML_VALUES:
            raise _UnfitError(
                f"line {event.start_mark.line + 1}: more than {MAX_YAML_VALUES:,} values, aliases counted as what they "
                "stand for; write large files as .json"
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None and not is_alias:
            self._values_of[event.anchor] = self._num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not where the mapping is constructed: by then ``<<`` has put the keys of others beside its own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _repeated(key.value, f" (lines {lines[key.value]} and {line})")
                lines[key.value] = line
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if problem := _unfit_int(text):
            raise _UnfitError(f"line {node.start_mark.line + 1}: {problem}")
        return int(text)


_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(_INT, re.compile(rf"^[-+]?{_DECIMAL}$"), list("-+0123456789"))
_YamlLoader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        rf"^([-+]?(({_DECIMAL}\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|{_DECIMAL}[eE][-+]?[0-9]+)"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_YamlLoader.add_constructor(_INT, _YamlLoader.construct_yaml_int)


def _repeated(key: str, where: str) -> _UnfitError:
    return _UnfitError(f"key {_shown(key)} is given twice{where}; keep one of the two")


def _unfit_int(text: str) -> str | None:
    """What is wrong with a whole number, if anything is."""
    num_digits = len(text.lstrip("-+"))
    if num_digits <= MAX_DIGITS:
        return None
    return f"a number of {num_digits:,} digits ({text[:12]}...), at most {MAX_DIGITS} are read; write what is meant"


def _too_deep() -> str:
    return f"lists or objects in each other, deeper than {MAX_DEPTH} levels; is it a file of this kind?"


def to_json(value: Any) -> str:
    """Formats a dataclass as JSON: keys in field order, two spaces of indent, lists of numbers on one line."""
    return _indent(adapter_of(type(value)).dump_python(value, mode="json")) + "\n"


def to_compact_json(value: Any) -> bytes:
    """Formats a dataclass as JSON for machines alone, many times faster than :func:`to_json`."""
    return adapter_of(type(value)).dump_json(value)


def parse_json(text: str, *, source: str, allow_nan: bool = False) -> Any:
    """Parses JSON ``text`` into plain data: objects as ``dict``, arrays as ``list``.

    Args:
        source: names the text in messages; empty if the caller does.
        allow_nan: take ``NaN`` and ``Infinity``, which are no JSON and which Python's own writer emits, for numbers.

    Raises:
        ConfigError: not JSON, a repeated key, a number of more digits than :data:`MAX_DIGITS` or too large for a
            float, or more than :data:`MAX_DEPTH` levels.
    """
    source = f"{source}: " if source else ""
    try:
        value = _DECODERS[allow_nan].decode(text)
    except json.JSONDecodeError as error:
        wrong = f"not JSON, line {error.lineno} column {error.colno}: {error.msg}. Is the file complete?"
        raise ConfigError(f"{source}{wrong if text.strip() else _EMPTY}") from None
    except _UnfitNumberError as error:
        raise ConfigError(f"{source}{_place_of_unfit(text, allow_nan)}: {error}") from None
    except _UnfitError as error:
        raise ConfigError(f"{source}{error}") from None
    except RecursionError:
        raise ConfigError(f"{source}{_too_deep()}") from None
    _check_depth(value, source)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook``: the object of ``pairs``."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _repeated(key, "")
            seen.add(key)
    return found


def _whole(digits: str) -> int:
    if problem := _unfit_int(digits):
        raise _UnfitNumberError(problem)
    return int(digits)


def _fraction(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _UnfitNumberError(f"{_shown(digits)} is too large for a number")
    return value


def _constant(word: str) -> float:
    raise _UnfitNumberError(f"{word} is no number of JSON; give a finite one, or null")


_DECODERS = {
    False: json.JSONDecoder(
        object_pairs_hook=_unique_keys, parse_int=_whole, parse_float=_fraction, parse_constant=_constant
    ),
    True: json.JSONDecoder(object_pairs_hook=_unique_keys, parse_int=_whole),
}
"""By whether ``NaN`` and infinity are taken for numbers."""


def _place_of_unfit(text: str, allow_nan: bool) -> str:
    """Where the first number is that the decoder refused: its hooks do not know where in the text they are."""

    def tried(hook: Callable[[str], Any]) -> Callable[[str], Any]:
        def parse(digits: str) -> Any:
            try:
                return hook(digits)
            except _UnfitNumberError:
                return _UNFIT

        return parse

    fraction, constant = (float, float) if allow_nan else (_fraction, _constant)
    try:
        value = json.loads(text, parse_int=tried(_whole), parse_float=tried(fraction), parse_constant=tried(constant))
    except (ValueError, RecursionError):  # what comes after it is wrong as well
        return "a number"
    return _place_of(_UNFIT, value) or "the top level"


def _check_depth(value: Any, source: str) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each) if isinstance(child, dict | list)]
        if not level:
            return
    raise ConfigError(f"{source}{_too_deep()}")


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _place_of(wanted: object, value: Any) -> str | None:
    """The keys and indices that lead to ``wanted``, with dots between them; ``None`` if they do not."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        if child is wanted:
            return str(key)
        if (below := _place_of(wanted, child)) is not None:
            return f"{key}.{below}"
    return None


def from_json(cls: type[T], text: str, *, source: str) -> T:
    """Parse ``text`` as a ``cls``.

    Raises:
        ConfigError: not JSON or beyond a limit, as :func:`parse_json` says, or a missing or unknown key, or a value of
            the wrong type. ``source`` names the text.
    """
    value = parse_json(text, source=source)
    return _validated(cls, text, value, source)


def checked(cls: type[T], data: Any, *, source: str) -> T:
    """Builds a ``cls`` from plain data of another format, under the same check of types as :func:`from_json`.

    Raises:
        ConfigError: a value is of the wrong type or breaks a rule of ``cls``.
    """
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: not plain data: {error}") from None
    return _validated(cls, text, data, source)


def load(cls: type[T], path: Path) -> T:
    """Read a ``cls`` from a ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ConfigError: the file is missing, is no JSON or YAML, is beyond a limit, or does not describe a ``cls``.
    """
    if path.suffix == ".json":
        return from_json(cls, read_text(path), source=str(path))
    return checked(cls, read_yaml(path), source=str(path))


def read_yaml(path: Path) -> Any:
    """Read the plain data of a YAML file.

    Raises:
        ConfigError: the file is missing, is no YAML, or is beyond a limit.
    """
    text = read_text(path, limit_bytes=MAX_YAML_BYTES)
    try:
        return _YamlLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except _UnfitError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML lets through what its constructors meet, such as ``!!bool 3``.
        raise ConfigError(f"{path}: not plain data: {type(error).__name__}: {error}") from None


def save(value: Any, path: Path) -> None:
    """Write ``value`` as JSON. The file appears complete or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    write_bytes(path, to_json(value).encode("utf-8"))


def read_text(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> str:
    """Reads a file that the user named as UTF-8 text.

    Raises:
        ConfigError: as :func:`read_bytes` does, or it is not UTF-8.
    """
    try:
        return read_bytes(path, limit_bytes=limit_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}; is it the right file?") from None


def read_bytes(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Reads all of a file that the user named, up to ``limit_bytes``.

    Raises:
        ConfigError: the file is missing, unreadable, no regular file, such as a pipe or a device, which may never end,
            or has more than ``limit_bytes``.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            fix = "name a file in it" if path.is_dir() else "copy what it holds into a file"
            raise ConfigError(f"{path}: no regular file but {_kind_of(path)}; {fix}")
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            # A size of 0 may be that of a file of /proc, which has content all the same.
            content = file.read(limit_bytes + 1) if size_bytes <= limit_bytes else b""
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {path.absolute().parent}); correct the path") from None
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path}: cannot be read: {error}") from None
    if max(size_bytes, len(content)) > limit_bytes:
        has = f"it has {max(size_bytes, len(content)):,} bytes, a file of this kind at most {limit_bytes:,}"
        raise ConfigError(f"{path}: {has}; is it the right file?")
    return content


def _kind_of(path: Path) -> str:
    return "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or a socket"


def near_match(word: str, known: list[str], *, least_similarity: float = 0.75) -> str:
    """A hint for a misspelt word: up to three known ones that begin with it, else the closest, or nothing.

    Args:
        least_similarity: of the closest one, as difflib computes it, from 0 to 1. A heuristic: two swapped letters of
            four agree by 3/4, one wrong of three by less.
    """
    begun = [each for each in known if word and each.lower().startswith(word.lower())]
    # All flags share their dashes.
    bare = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=least_similarity)
    matches = begun[:3] or [bare[each] for each in close]
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def adapter_of(cls: type[T]) -> TypeAdapter[T]:
    """Reads and writes values of ``cls``. With a plan in them it takes 0.1 s to make: who forks may ask before."""
    key: Any = cls
    return _made_adapter(key)


@functools.cache
def _made_adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _validated(cls: type[T], text: str, data: Any, source: str) -> T:
    """``data`` as a ``cls``, also if an earlier version of this program wrote it; ``text`` says the same in JSON."""
    todays = upgraded(cls, data, source=source)
    try:
        value = adapter_of(cls).validate_json(text if todays is data else json.dumps(todays))
    except ValidationError as error:
        if wrong := _EMPTY if data is None else wrong_kind(_field_names(_class_at(cls, [])), data):
            raise ConfigError(f"{source}: {wrong}") from None
        found = error.errors(include_url=False)
        problems = [_describe(cls, problem) for problem in found[:_MAX_PROBLEMS]]
        if len(found) > _MAX_PROBLEMS:
            problems.append(f"and {len(found) - _MAX_PROBLEMS:,} more")
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None
    check_fields(value, kind=cls, json_text=text, source=source)
    return value


def _describe(cls: type[Any], problem: Any) -> str:
    *parents, key = problem["loc"] or ("(top level)",)
    where = printable(".".join(str(part) for part in problem["loc"])) or "the top level"
    match problem["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = _field_names(_class_at(cls, parents))
            hint = near_match(str(key), known) or f" (known keys: {', '.join(known)})"
            return f"unknown key {where!r}{hint}"
        case "missing" | "missing_keyword_only_argument" | "missing_argument":
            return f"missing key {where!r}"
        case "value_error":
            return f"{where}: {problem['ctx']['error']}" if problem["loc"] else str(problem["ctx"]["error"])
        case _:
            return f"{where}: {problem['msg']}, got {_shown(problem['input'])}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _field_names(cls: type[Any] | None) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)] if cls is not None else []


def _class_at(cls: type[Any], path: list[Any]) -> type[Any] | None:
    """The dataclass found by following ``path`` (field names and list indices) from ``cls``."""
    current: Any = cls
    for part in path:
        if not isinstance(part, str) or not dataclasses.is_dataclass(current):
            continue
        current = get_type_hints(current).get(part)
        nested = [current, *get_args(current)]
        current = next((kind for kind in nested if dataclasses.is_dataclass(kind)), current)
    return current if dataclasses.is_dataclass(current) and isinstance(current, type) else None


def _indent(value: Any, depth: int = 0) -> str:
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        rows = [f"{pad}{json.dumps(key)}: {_indent(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        rows = [pad + _indent(item, depth + 1) for item in value]
        return "[\n" + ",\n".join(rows) + "\n" + "  " * depth + "]"
    return json.dumps(value)
