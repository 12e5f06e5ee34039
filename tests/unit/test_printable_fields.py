"""Names in files: those that are not printable are refused, wherever they are; texts of any characters are not."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
from pydantic import ConfigDict, JsonValue

from hetero.errors import ConfigError
from hetero.printable_fields import ANY_TEXT, AnyText, check_name
from hetero.serialization import STRICT, checked, from_json

STRANGE = ("a\nb", "a\tb", "\x1b[2Ja", "a\x7f", "a\x9bb", "a\u202eb", "a\u200bb", "\ufeffa", "a\u00a0b", "a\r")
"""A line's end, an escape sequence, a change of direction, spaces that are not seen, and their likes."""

PLAIN = ("a", "größe-8", "機器", "[red]a[/red]", "a\\nb", "a'\"b", "µs", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    number: int | str = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Whole:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    title: str = ""
    number: int | str | None = None
    parts: tuple[_Part, ...] = ()
    pair: tuple[str, _Part] | None = None
    names: dict[str, str] = field(default_factory=dict)
    set_of_names: frozenset[str] = frozenset()
    part_by_name: dict[str, _Part] = field(default_factory=dict)
    note: AnyText = ""
    notes: tuple[AnyText, ...] = ()
    optional_note: AnyText | None = None
    notes_by_name: dict[str, AnyText] = field(default_factory=dict)
    data: Annotated[dict[str, JsonValue], ANY_TEXT] | None = None


def _places(text: str) -> list[tuple[str, dict[str, object]]]:
    part = {"name": text}
    return [
        ("title", {"title": text}),
        ("number", {"number": text}),
        ("parts.1.name", {"parts": [{"name": "a"}, part]}),
        ("parts.0.number", {"parts": [{"name": "a", "number": text}]}),
        ("pair.0", {"pair": [text, {"name": "a"}]}),
        ("pair.1.name", {"pair": ["a", part]}),
        ("names.a", {"names": {"a": text}}),
        ("names.a key", {"names": {text: "a"}}),
        ("set_of_names.0", {"set_of_names": [text]}),
        ("part_by_name.a.name", {"part_by_name": {"a": part}}),
        ("part_by_name.a key", {"part_by_name": {text: {"name": "a"}}}),
        ("notes_by_name.a key", {"notes_by_name": {text: ""}}),
    ]


@pytest.mark.parametrize("as_ascii", [True, False])
@pytest.mark.parametrize("text", STRANGE)
def test_a_name_that_is_not_printable_is_refused_wherever_it_is(text: str, as_ascii: bool) -> None:
    for place, data in _places(text):
        with pytest.raises(ConfigError) as refused:
            from_json(_Whole, json.dumps(data, ensure_ascii=as_ascii), source="a file")
        said = str(refused.value)
        assert said.startswith(f"a file: {place}: '"), said
        assert said.isprintable()
        with pytest.raises(ConfigError, match="not printable; take it out"):
            checked(_Whole, data, source="a file")


@pytest.mark.parametrize("text", PLAIN)
def test_a_name_that_is_printable_is_taken(text: str) -> None:
    for _, data in _places(text):
        assert from_json(_Whole, json.dumps(data), source="a file") == checked(_Whole, data, source="a file")


@pytest.mark.parametrize("text", STRANGE)
def test_texts_of_any_characters_are_taken(text: str) -> None:
    data = {
        "note": text,
        "notes": [text],
        "optional_note": text,
        "notes_by_name": {"a": text},
        "data": {text: [text, {"a": text}]},
    }
    value = from_json(_Whole, json.dumps(data), source="a file")
    assert {**dataclasses.asdict(value), "notes": list(value.notes)} == {
        **dataclasses.asdict(_Whole()),
        "notes": [text],
        **{key: data[key] for key in data if key != "notes"},
    }


def test_a_wrong_value_below_a_strange_key_is_told_on_one_line() -> None:
    with pytest.raises(ConfigError) as refused:
        from_json(_Whole, json.dumps({"part_by_name": {"a\n\x1b[2J": {"name": 3}}}), source="a file")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb", r"--name: 'a\nb' has the character U+000A, which is not printable; take it out"),
        (
            "a\u202eb",
            r"--name: 'a\u202eb' has the character U+202E (RIGHT-TO-LEFT OVERRIDE), "
            "which is not printable; take it out",
        ),
        (
            "\x1b" * 100,
            "--name: '" + r"\x1b" * 20 + "...' has the character U+001B, which is not printable; take it out",
        ),
    ],
)
def test_the_message_names_the_character(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_name(text, what="--name")
    assert str(refused.value) == said
