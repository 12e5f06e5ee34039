"""Defines the rules that account for the keys of a configuration, and checks a configuration against them.

Whatever a file says has either an effect on the model here, or a reason to have none; the rest is refused. A value
that a file leaves out is that of the family's class in ``transformers``.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero.serialization import near_match


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Which values a key may have: a test, and ``limit``, its wording in messages."""

    limit: str
    accepts: Callable[[Any], bool]

    def or_null(self) -> "ValueKind":
        """The same values and ``None``."""
        return ValueKind(f"{self.limit}, or null", lambda value: value is None or self.accepts(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_MODEL_CLASSES = ("AutoModel", "TFAutoModel", "FlaxAutoModel")

COUNT = ValueKind("a whole number of at least 1", lambda value: type(value) is int and value >= 1)
COUNT_FROM_0 = ValueKind("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
POSITIVE = ValueKind("a number above 0", lambda value: _is_number(value) and value > 0)
SWITCH = ValueKind("true or false", lambda value: type(value) is bool)
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
NO_MODEL_CODE = ValueKind(
    "an object without a model's class (Python code of the folder is not run; take it out if transformers computes the "
    "same without that code)",
    lambda value: isinstance(value, dict) and not any(name.startswith(_MODEL_CLASSES) for name in value),
)
TEXTS = ValueKind("a list of texts", lambda value: isinstance(value, list) and all(type(each) is str for each in value))


def texts_of(*names: str) -> ValueKind:
    """Values that are lists of some of ``names``."""
    limit = f"a list with nothing but {' or '.join(names)}"
    return ValueKind(limit, lambda value: TEXTS.accepts(value) and set(value) <= set(names))


_MISSPELT = 0.8
"""Least similarity of a misspelt key: files mostly come from programs, which write keys of their own."""

REQUIRED = object()
"""Stands for the default of a key that every file must have."""


@dataclass(frozen=True, slots=True)
class Read:
    """The key decides these fields of ``ModelSpec``; none where it only decides whether the model can be expressed."""

    into: tuple[str, ...]
    kind: ValueKind
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class Only:
    """The key has to have one of these values.

    default: what the family has where a file leaves the key out, ``None`` for the first of the values.
    """

    values: tuple[Any, ...]
    because: str
    default: Any = None

    @property
    def unless_given(self) -> Any:
        """The value of a file that leaves the key out."""
        return self.values[0] if self.default is None else self.default


@dataclass(frozen=True, slots=True)
class SameAs:
    """The key says again what ``key`` says, or nothing."""

    key: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """The key changes neither parameters nor arithmetic, whatever its value."""

    because: str


KeyRule = Read | Only | SameAs | Ignored
KeyTable = Mapping[str, KeyRule]


class UnreadableError(Exception):
    """A key that is missing or has a value of another kind, where a model is built."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """The values of one configuration, with defaults for those that the file leaves out.

    family: its ``model_type``.
    table: the rules of the family.
    given: what the file says.
    """

    family: str
    table: KeyTable
    given: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Returns the value of a key.

        Raises:
            UnreadableError: :meth:`problems` says what is wrong with it.
        """
        rule = self.table[key]
        if self._problem(key, rule) is not None:
            raise UnreadableError(key)
        return self._value(key, rule)

    def problems(self) -> list[str]:
        """Returns what is wrong with the keys of the file: a line for all unknown ones, and one for each value."""
        problems = [self._problem(key, rule) for key, rule in self.table.items() if self._counts(key, rule)]
        return [problem for problem in (self._unknown_keys(), *problems) if problem is not None]

    def _counts(self, key: str, rule: KeyRule) -> bool:
        return not isinstance(rule, Ignored) and (key in self.given or not isinstance(rule, SameAs))

    def _unknown_keys(self) -> str | None:
        unknown = [key for key in self.given if key not in self.table]
        if not unknown:
            return None
        # A key that the file has is not misspelt at another place of it.
        absent = [key for key, rule in self.table.items() if not isinstance(rule, Ignored) and key not in self.given]
        shown = [
            f"{key!r} ({reprlib.repr(self.given[key])}){near_match(key, absent, least_similarity=_MISSPELT)}"
            for key in unknown
        ]
        several = len(unknown) > 1
        return (
            f"key{'s' if several else ''} {', '.join(shown)} {'are' if several else 'is'} not accounted for in "
            f"{self.family} models here; take {'them' if several else 'it'} out of the file if the model computes the "
            f"same without {'them' if several else 'it'}"
        )

    def _problem(self, key: str, rule: KeyRule) -> str | None:
        """What is wrong with a key that counts; ``None`` if nothing is."""
        if isinstance(rule, Read) and rule.default is REQUIRED and key not in self.given:
            return f"missing key {key!r} of a {self.family} configuration"
        value = self._value(key, rule)
        shown = f"{key} is {reprlib.repr(value)}" + ("" if key in self.given else " where a file leaves it out")
        match rule:
            case Read(_, kind, _) if key in self.given and not kind.accepts(value):
                return f"{shown}, must be {kind.limit}"
            case Only(values, because) if value not in values:
                return (
                    f"{shown}, GPTModel here has {' or '.join(map(repr, values))}: {because}; to plan for the same "
                    "shape, write a model file as in scripts/presets/models/"
                )
            case SameAs(other) if value is not None and other in self.given and value != self.given[other]:
                return f"{shown} and {other} {self.given[other]!r}: they must be equal"
        return None

    def _value(self, key: str, rule: KeyRule) -> Any:
        """What the file says, or the default of the family."""
        if key in self.given:
            return self.given[key]
        if isinstance(rule, Only):
            return rule.unless_given
        assert isinstance(rule, Read), key
        assert rule.default is not REQUIRED, key
        return rule.default
