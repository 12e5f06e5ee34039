"""Frozen dataclasses to and from JSON and YAML; unknown keys are refused with the near match, repeated ones too.

Humans write YAML, machines write JSON; both load through the same strict check of types, so ``"4"`` is not 4.
"""

import dataclasses
import difflib
import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hetero.errors import ConfigError

T = TypeVar("T")

_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Assign to ``__pydantic_config__`` of every dataclass that is read from a file."""


class _YamlLoader(yaml.SafeLoader):
    """PyYAML speaks YAML 1.1, in which ``1e-5`` is a text; here it is a number, as in YAML 1.2 and JSON.

    A key that a mapping has twice is refused: PyYAML would take the last one and say nothing.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not where the mapping is constructed: by then ``<<`` has put the keys of others beside its own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _DuplicateKeyError(key.value, f" (lines {lines[key.value]} and {line})")
                lines[key.value] = line
        return node


class _DuplicateKeyError(ValueError):
    """A mapping of a file has one key twice."""

    def __init__(self, key: str, where: str) -> None:
        super().__init__(f"key {key!r} is given twice{where}; keep one of the two")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook``: the object of ``pairs``."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(key, "")
        found[key] = value
    return found


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def to_json(value: Any) -> str:
    """JSON text of a dataclass; keys in field order, two spaces of indent, lists of numbers on one line."""
    return _indent(_adapter(type(value)).dump_python(value, mode="json")) + "\n"


def from_json(cls: type[T], text: str, *, source: str) -> T:
    """Parse ``text`` as a ``cls``.

    Raises:
        ConfigError: not JSON, a missing, unknown or repeated key, or a value of the wrong type. ``source`` names the
            text.
    """
    try:
        json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not JSON, line {error.lineno} column {error.colno}: {error.msg}. Is the file complete?"
        ) from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{source}: {error}") from None
    return _validated(cls, text, source)


def load(cls: type[T], path: Path) -> T:
    """Read a ``cls`` from a ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        ConfigError: the file is missing, is no JSON or YAML, or does not describe a ``cls``.
    """
    text = read_text(path)
    if path.suffix == ".json":
        return from_json(cls, text, source=str(path))
    try:
        data = yaml.load(text, Loader=_YamlLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        # YAML has dates, which JSON has not: they stay the text that was written.
        as_json = json.dumps(data, default=str)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not plain data: {error}") from None
    return _validated(cls, as_json, str(path))


def save(value: Any, path: Path) -> None:
    """Write ``value`` as JSON. The file appears complete or not at all.

    Raises:
        ConfigError: it cannot be written there.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(to_json(value), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The text of a file that the user named.

    Raises:
        ConfigError: the file is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (looked in {path.absolute().parent})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None


def near_match(word: str, known: list[str]) -> str:
    """`` (did you mean 'x'?)``: up to three known words that ``word`` begins, else the closest; nothing if none is."""
    begun = [each for each in known if word and each.lower().startswith(word.lower())]
    matches = begun[:3] or difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


def _adapter(cls: type[T]) -> TypeAdapter[T]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def _validated(cls: type[T], text: str, source: str) -> T:
    try:
        value = _adapter(cls).validate_json(text)
    except ValidationError as error:
        problems = [_describe(cls, problem) for problem in error.errors(include_url=False)]
        raise ConfigError(f"{source}: " + "; ".join(problems)) from None
    return value


def _describe(cls: type[Any], problem: Any) -> str:
    *parents, key = problem["loc"] or ("(top level)",)
    where = ".".join(str(part) for part in problem["loc"]) or "the top level"
    match problem["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = _field_names(_class_at(cls, parents))
            hint = near_match(str(key), known) or f" (known keys: {', '.join(known)})"
            return f"unknown key {where!r}{hint}"
        case "missing" | "missing_keyword_only_argument" | "missing_argument":
            return f"missing key {where!r}"
        case "value_error":
            return f"{where}: {problem['ctx']['error']}"
        case _:
            return f"{where}: {problem['msg']}, got {problem['input']!r}"


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
