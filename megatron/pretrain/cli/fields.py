"""Declares flags as metadata of config fields, lists them all, and fills a config with their values.

A config is a frozen dataclass whose every field says where its value comes from: :func:`flag` (one flag, called like
the field), :func:`off_switch` (a flag that makes it false), :func:`computed` (a function of all flags) or :func:`part`
(a config of its own). Parser, ``--help``, messages about names and the finished config all follow from that.
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from megatron.pretrain.cli.value_types import PATH, ValueType, one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
C = TypeVar("C", bound="DataclassInstance")

_SOURCE = "source"
"""Key of a field's metadata."""


class UnreadableFlagError(Exception):
    """Somebody asks for the value of a flag that has none: a wrong value was given, or none where one is required."""


@dataclass(frozen=True, slots=True)
class FlagValues:
    """Holds the value of every flag by its name, and which of them the user gave.

    unreadable: flags that have no value, since the given one is wrong or a required one is missing. Who asks for it
        cannot judge what follows from it.
    notes: flags that were given and have no effect, each with the reason.
    from_file: flags that only a file of settings has, which states also what has no effect.
    effective: flags that were given with a value that changes something; empty until :mod:`.rules` has looked.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    unreadable: frozenset[str] = frozenset()
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    from_file: frozenset[str] = frozenset()
    effective: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Any:
        """The value of the flag.

        Raises:
            UnreadableFlagError: it has none.
        """
        if name in self.unreadable:
            raise UnreadableFlagError(name)
        return self.values[name]

    def shown(self, name: str) -> str:
        """Write the flag as the user did, for messages."""
        value = self[name]
        if isinstance(value, bool):
            return name
        return " ".join([name, *map(str, value)]) if isinstance(value, tuple) else f"{name} {value}"


@dataclass(frozen=True, slots=True)
class Condition:
    """Says what must hold for a flag to have an effect, and what the user adds to make it hold.

    note: where it does not hold, the flag is let pass with this reason and is no error: published scripts carry it.
    switch: the flag that it is about. Where the user switches that off with a 0, what needs it may stay.
    """

    holds: Callable[[FlagValues], bool]
    fix: str
    note: str = ""
    switch: str = ""

    def is_switched_off(self, flags: FlagValues) -> bool:
        """Whether the user has given the flag that it is about, with a value that switches it off."""
        return self.switch in flags.given and not flags[self.switch]


def given(name: str, note: str = "") -> Condition:
    """Require that a switch, a path, paths, or a number other than 0 is given."""
    return Condition(lambda flags: bool(flags[name]), name, note=note, switch=name)


def equals(name: str, value: str) -> Condition:
    """Require that a flag has this value, given or by default."""
    return Condition(lambda flags: bool(flags[name] == value), f"{name} {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Relations:
    """Says how a flag goes together with others; :mod:`megatron.pretrain.cli.rules` checks it.

    needs: the flag has an effect only where all of these hold.
    excludes: flags that may not stand beside it; of two such flags one says so, which messages name first.
    stated_by_plan: a plan states it for each stage, so that it may not stand beside one.
    in_steps: the flag that states the same length in steps, where this one states it in samples.
    idle: whether its value changes nothing although it is not the default, such as the size of what is switched off.
    """

    needs: tuple[Condition, ...] = ()
    excludes: tuple[str, ...] = ()
    stated_by_plan: bool = False
    in_steps: str | None = None
    idle: Callable[[FlagValues], bool] | None = None


UNRELATED = Relations()
"""Of a flag that goes together with all others."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Describes one flag of the command line.

    type: of its value, ``None`` for a switch.
    many: takes one value or more.
    off: a second name, which switches this switch off.
    group: of ``--help``; empty is that of the config.
    """

    name: str
    help: str
    type: ValueType[Any] | None = None
    default: Any = dataclasses.field(default=None, kw_only=True)
    many: bool = dataclasses.field(default=False, kw_only=True)
    off: str | None = dataclasses.field(default=None, kw_only=True)
    required: bool = dataclasses.field(default=False, kw_only=True)
    group: str = dataclasses.field(default="", kw_only=True)
    relations: Relations = dataclasses.field(default=UNRELATED, kw_only=True)

    @property
    def is_switch(self) -> bool:
        return self.type is None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.off is None else (self.name, self.off)


def switch(name: str, help: str, group: str = "", *, relations: Relations = UNRELATED) -> Flag:
    """Make a flag without a value, for :func:`computed`: true where it is given."""
    return Flag(name, help, default=False, group=group, relations=relations)


@dataclass(frozen=True, slots=True)
class FlagReader(Generic[T]):
    """Knows the flags that decide a field or a whole config, and makes it of their values."""

    flags: tuple[Flag, ...]
    read: Callable[[FlagValues], T]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Declared:
    """Describes a field of a config class: its name, its type without ``None``, its default, and its config's group."""

    name: str
    type: Any
    default: Any
    group: str


_Source = Callable[[_Declared], FlagReader[Any]]
"""What a field's metadata holds: makes the reader of the field, whose name and type it is told."""


def _field(source: _Source, default: Any = MISSING) -> Any:
    return dataclasses.field(default=default, metadata={_SOURCE: source})


@overload
def flag(
    help: str,
    type: ValueType[Any] | None = None,
    *,
    name: str = "",
    off: str | None = None,
    group: str = "",
    relations: Relations = UNRELATED,
) -> Any: ...
@overload
def flag(
    help: str,
    type: ValueType[Any] | None = None,
    *,
    default: T,
    name: str = "",
    off: str | None = None,
    group: str = "",
    relations: Relations = UNRELATED,
) -> T: ...
def flag(
    help: str,
    type: ValueType[Any] | None = None,
    *,
    default: Any = MISSING,
    name: str = "",
    off: str | None = None,
    group: str = "",
    relations: Relations = UNRELATED,
) -> Any:
    """Declare a field with the value of one flag. Without a default, the field's own or this one, the flag is required.

    Args:
        type: of the value. It need not be given where the field's type says it: a switch for ``bool``, the choices of
            a ``Literal``, a ``Path``. A tuple takes one value or more.
        name: as users write it; without it the field's name, ``--num-layers`` of ``num_layers``.
        off: a second name, which switches a switch off.
        group: of ``--help``, where it is not the one of the config.
        relations: to other flags.
    """

    def source(field: _Declared) -> FlagReader[Any]:
        many = get_origin(field.type) is tuple
        found = Flag(
            name or _flag_name(field.name),
            help,
            type or _type_of(get_args(field.type)[0] if many else field.type),
            default=None if field.default is MISSING else field.default,
            many=many,
            off=off,
            required=field.default is MISSING,
            group=group or field.group,
            relations=relations,
        )
        return FlagReader((found,), lambda flags: flags[found.name])

    return _field(source, default)


def off_switch(name: str, help: str, *, group: str = "") -> bool:
    """Declare a field that is true unless the switch ``name`` is given.

    Args:
        group: of ``--help``, where it is not the one of the config.
    """

    def source(field: _Declared) -> FlagReader[Any]:
        return FlagReader((Flag(name, help, default=False, group=group or field.group),), lambda flags: not flags[name])

    found: bool = _field(source, True)
    return found


def computed(compute: Callable[[FlagValues], T], *flags: Flag) -> T:
    """Declare a field that follows from several flags, of which ``flags`` are declared here."""

    def source(field: _Declared) -> FlagReader[T]:
        return FlagReader(tuple(dataclasses.replace(flag, group=flag.group or field.group) for flag in flags), compute)

    found: T = _field(source)
    return found


def part(
    group: str = "", fields: Mapping[str, Any] | None = None, *, when: Callable[[FlagValues], bool] | None = None
) -> Any:
    """Declare a field with a config of its own, ``None`` unless ``when`` holds.

    Args:
        group: of its flags in ``--help``; without it, that of the config around it.
        fields: where the values of its fields come from, for a class of a layer that knows no flags.
    """

    def source(field: _Declared) -> FlagReader[Any]:
        whole = flag_reader(field.type, group or field.group, fields)
        if when is None:
            return whole
        return FlagReader(whole.flags, lambda flags: whole.read(flags) if when(flags) else None)

    return _field(source)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag, off_switch, computed, part))
def config_dataclass(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields say which flags they come from."""
    return dataclass(frozen=True, kw_only=True, slots=True)(cls)


def flag_reader(cls: type[C], group: str = "", fields: Mapping[str, Any] | None = None) -> FlagReader[C]:
    """Collect all flags of a config class, in the order of its fields, and how it is made of their values.

    Args:
        fields: where its fields come from if they do not say so themselves.
    """
    annotations, own = get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    readers: dict[str, FlagReader[Any]] = {}
    for name, field in (own if fields is None else fields).items():
        default = own[name].default if field.default is MISSING else field.default
        declared = _Declared(name=name, type=_without_none(annotations[name]), default=default, group=group)
        readers[name] = field.metadata[_SOURCE](declared)
    return FlagReader(
        tuple(flag for reader in readers.values() for flag in reader.flags),
        lambda flags: cls(**{name: reader.read(flags) for name, reader in readers.items()}),
    )


def _flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    return functools.reduce(operator.or_, (choice for choice in get_args(annotation) if choice is not types.NoneType))


def _type_of(annotation: Any) -> ValueType[Any] | None:
    """Find the type of values that a field's type tells; ``None`` for a switch."""
    if annotation is bool:
        return None
    if annotation is Path:
        return PATH
    if get_origin(annotation) is Literal:
        return one_of(*get_args(annotation))
    raise TypeError(f"a flag of type {annotation} has limits that its declaration must say")
