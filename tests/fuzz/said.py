"""Does an object hold what a file says, and nothing else? Read a second time, by other code than the project's."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True)
class Plain:
    """What a file has without quotes: a number, true, false or null, and in YAML a text."""

    text: str
    may_be_text: bool


def assert_says(path: Path, value: object) -> None:
    """``value`` is what ``path``, JSON or YAML, says; fields that it does not mention have their defaults."""
    text = path.read_text(encoding="utf-8")
    said = _json(text) if path.suffix == ".json" else _yaml(yaml.compose(text, Loader=yaml.BaseLoader))
    _compare(value, said, at="top level")


def _json(text: str) -> Any:
    def word(value: Any) -> Any:
        return Plain(json.dumps(value), False) if isinstance(value, bool) or value is None else value

    def plain(text: str) -> Plain:
        return Plain(text, False)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else word(value)

    return walk(json.loads(text, object_pairs_hook=_once, parse_int=plain, parse_float=plain, parse_constant=plain))


def _yaml(node: yaml.Node) -> Any:
    match node:
        case yaml.MappingNode():
            return _once([(key.value, _yaml(value)) for key, value in node.value])
        case yaml.SequenceNode():
            return [_yaml(value) for value in node.value]
        case yaml.ScalarNode():
            return Plain(node.value, True) if node.style is None else node.value
    raise AssertionError(f"nothing was read of {node}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a repeated key was read: {[key for key, _ in pairs]}"
    return dict(pairs)


def _compare(value: object, said: Any, *, at: str) -> None:
    if dataclasses.is_dataclass(value):
        fields = {field.name: field for field in dataclasses.fields(value)}
        assert isinstance(said, dict), f"{at}: {said!r} was read as {value}"
        assert said.keys() <= fields.keys(), f"{at}: {said.keys() - fields.keys()} were read over"
        for name, field in fields.items():
            if name in said:
                _compare(getattr(value, name), said[name], at=f"{at}.{name}")
            else:
                assert getattr(value, name) == field.default, f"{at}.{name} is {getattr(value, name)}, from nowhere"
    elif isinstance(value, tuple):
        assert isinstance(said, list), f"{at}: {said!r} was read as {value}"
        assert len(said) == len(value), f"{at}: {said!r} was read as {value}"
        for i, (item, its) in enumerate(zip(value, said, strict=True)):
            _compare(item, its, at=f"{at}.{i}")
    elif isinstance(value, dict):
        assert isinstance(said, dict), f"{at}: {said!r} was read as {value}"
        assert said.keys() == value.keys(), f"{at}: {said.keys()} were read as {value.keys()}"
        for key, item in value.items():
            _compare(item, said[key], at=f"{at}.{key}")
    else:
        assert _is_said(value, said), f"{at}: {said!r} was read as {value!r}"


def _is_said(value: object, said: Any) -> bool:
    if isinstance(value, str):
        return said == value or (isinstance(said, Plain) and said.may_be_text and said.text == value)
    if not isinstance(said, Plain):
        return False
    text = said.text
    match value:
        case None:
            return text in ("null", "Null", "NULL", "~", "")
        case bool():
            return text.lower() in (("true", "yes", "on") if value else ("false", "no", "off"))
        case int():
            return re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text) is not None and int(text) == value
        case float():
            return float(text) == value
    return False
