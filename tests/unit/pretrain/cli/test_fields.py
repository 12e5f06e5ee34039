"""Flags as fields: what a declaration says by itself, and what follows from the field's name, type and default."""

from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.pretrain.cli.fields import (
    Flag,
    FlagValues,
    Relations,
    computed,
    config_dataclass,
    equals,
    flag,
    flag_reader,
    given,
    off_switch,
    part,
    switch,
)
from megatron.pretrain.cli.value_types import COUNT, PATH


@dataclass(frozen=True)
class Outside:
    """Of a layer that knows no flags."""

    window: int = 3


@config_dataclass
class Inner:
    size: int = flag("A size.", COUNT)
    paths: tuple[Path, ...] = flag("Paths.", default=())


@config_dataclass
class Outer:
    style: Literal["a", "b"] = flag("A style.", default="a")
    file: Path | None = flag("A file.", name="--the-file", default=None, group="files")
    verbose: bool = flag("Say more.", default=False, off="--quiet")
    color: bool = off_switch("--no-color", "No color.")
    doubled: int = computed(lambda flags: 2 * flags["--half"], Flag("--half", "Half of it.", COUNT, default=4))
    again: str = computed(itemgetter("--style"))
    outside: Outside = part("other", {"window": flag("A window.", COUNT)})
    inner: Inner | None = part("inner", when=lambda flags: bool(flags["--size"]))


OUTER = flag_reader(Outer, "outer")
BY_NAME = {flag.name: flag for flag in OUTER.flags}


def values(**given: Any) -> FlagValues:
    changed = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return FlagValues({flag.name: flag.default for flag in OUTER.flags} | changed, frozenset(changed))


def test_flags_come_in_the_order_of_the_fields() -> None:
    names = ["--style", "--the-file", "--verbose", "--no-color", "--half", "--window", "--size", "--paths"]
    assert [flag.name for flag in OUTER.flags] == names


def test_the_fields_type_tells_the_values_type() -> None:
    style = BY_NAME["--style"].type
    assert style is not None
    assert style.choices == ("a", "b")
    assert BY_NAME["--the-file"].type is BY_NAME["--paths"].type is PATH
    assert BY_NAME["--verbose"].is_switch
    assert [flag.name for flag in OUTER.flags if flag.many] == ["--paths"]


def test_a_flag_without_a_default_is_required() -> None:
    assert [flag.name for flag in OUTER.flags if flag.required] == ["--size"]
    assert BY_NAME["--window"].default == 3


def test_a_flag_stands_in_the_group_of_its_config_or_in_its_own() -> None:
    groups = {name: flag.group for name, flag in BY_NAME.items()}
    assert groups["--style"] == groups["--half"] == groups["--no-color"] == "outer"
    assert (groups["--the-file"], groups["--window"], groups["--paths"]) == ("files", "other", "inner")


def test_a_config_is_filled_from_the_values() -> None:
    assert OUTER.read(values()) == Outer(
        style="a", file=None, verbose=False, color=True, doubled=8, again="a", outside=Outside(3), inner=None
    )
    changed = values(style="b", the_file=Path("x"), no_color=True, half=1, window=5, size=2, paths=(Path("y"),))
    assert OUTER.read(changed) == Outer(
        style="b",
        file=Path("x"),
        verbose=False,
        color=False,
        doubled=2,
        again="b",
        outside=Outside(5),
        inner=Inner(size=2, paths=(Path("y"),)),
    )


def test_values_are_shown_as_the_user_wrote_them() -> None:
    shown = values(style="b", verbose=True, paths=(Path("y"), Path("z"))).shown
    assert [shown(name) for name in ("--style", "--verbose", "--paths")] == ["--style b", "--verbose", "--paths y z"]


def test_a_number_must_say_its_limits() -> None:
    @config_dataclass
    class Unlimited:
        count: int = flag("A count.")

    with pytest.raises(TypeError, match="a flag of type <class 'int'> has limits"):
        flag_reader(Unlimited)


def test_relations_stay_with_their_flag() -> None:
    relations = Relations(excludes=("--other",))

    @config_dataclass
    class Related:
        one: bool = flag("One.", default=False, relations=relations)
        two: bool = computed(itemgetter("--two"), switch("--two", "Two.", relations=relations))
        other: bool = flag("Other.", default=False)

    assert [flag.relations for flag in flag_reader(Related, "group").flags] == [relations, relations, Relations()]


def test_conditions() -> None:
    assert [given("--verbose").holds(values(verbose=verbose)) for verbose in (True, False)] == [True, False]
    assert [given("--paths").holds(values(paths=paths)) for paths in ((), (Path("x"),))] == [False, True]
    assert [equals("--style", "b").holds(values(style=style)) for style in "ab"] == [False, True]
    assert (given("--verbose").fix, equals("--style", "b").fix) == ("--verbose", "--style b")


def test_a_switch_is_off_unless_given() -> None:
    assert switch("--x", "X.").default is False
