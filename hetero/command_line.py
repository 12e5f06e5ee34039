"""Reads command lines, and says in one line what is wrong with one: the flag, its value, what it takes."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from hetero.errors import ConfigError
from hetero.printable_fields import check_name
from hetero.serialization import near_match
from hetero.standard_output import STDOUT, output_file

_MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

N = TypeVar("N", int, float)

_FILE = "a file or a folder"

_LIMITS: Mapping[Any, str] = MappingProxyType(
    {int: "a whole number, without a unit", float: "a number, without a unit", Path: _FILE, output_file: _FILE}
)
"""By the type of a flag, what it takes."""


class UsageError(ConfigError):
    """A command line is wrong; the message begins with the name of the program."""


@dataclass(frozen=True, slots=True)
class NumberType(Generic[N]):
    """The type of a flag that takes the numbers that ``accepts`` lets pass; ``limit`` puts that into words."""

    kind: type[N]
    limit: str
    accepts: Callable[[N], bool]

    def __call__(self, text: str) -> N:
        """Convert ``text``, as argparse asks for it.

        Raises:
            argparse.ArgumentTypeError: it is no such number.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {_shown(text)}, must be {self}") from None
        if not self.accepts(value):
            raise argparse.ArgumentTypeError(f"is {_cut(text)}, must be {self.limit}")
        return value

    def __str__(self) -> str:
        """What it takes."""
        return f"{_LIMITS[self.kind]}, {self.limit}"


def whole_number(least: int, most: int | None = None) -> NumberType[int]:
    """The type of a flag that takes whole numbers from ``least`` on, up to ``most``."""
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    return NumberType(int, limit, lambda value: least <= value and (most is None or value <= most))


def number(limit: str, accepts: Callable[[float], bool]) -> NumberType[float]:
    """The type of a flag that takes the numbers that ``accepts`` lets pass; ``limit`` puts that into words."""
    return NumberType(float, limit, accepts)


ABOVE_0 = number("above 0", lambda value: value > 0)
FROM_0 = number("at least 0", lambda value: value >= 0)
BELOW_1 = number("at least 0 and below 1", lambda value: 0 <= value < 1)
COUNT = whole_number(1)
PORT = whole_number(1, 2**16 - 1)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _shown(text: str) -> str:
    return repr(_cut(text))


class Parser(argparse.ArgumentParser):
    """Reads a command line; each mistake is one :class:`ConfigError` instead of the usage and an exit.

    Flags are written in full: an abbreviation would change its meaning when a flag is added.

    It hands a command that has a default for ``flags`` all words behind ``--``, wherever its own words stand; argparse
    would take the first of them for one more positional of the command, of which it has had all.

    passes_on: flags that are not its own are another parser's.
    """

    def __init__(self, *args: Any, passes_on: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.passes_on = passes_on

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does.

        Raises:
            ConfigError: a flag or a value is wrong, or one is missing.
        """
        words = list(sys.argv[1:] if args is None else args)
        own = words.index("--") if "--" in words else len(words)
        self._check_flags(words[:own])
        if own == len(words) or self.get_default("flags") is None:
            return super().parse_known_args(words, namespace)
        found, unknown = super().parse_known_args(words[:own], namespace)
        found.flags = words[own + 1 :]
        return found, unknown

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does.

        Raises:
            ConfigError: a flag or a value is wrong, one is missing, or a word is too many; it names the command.
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            getattr(found, "parser", self).error(
                f"unexpected {' '.join(unknown)!r}; put the name of its flag before it, or leave it out"
            )
        return found

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits.

        Raises:
            ConfigError: always.
        """
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = self._told_missing(missing.split(", "))
        first, conflicts, second = message.partition(": not allowed with argument ")
        if conflicts:
            message = f"{first} and {second} exclude each other; leave one out"
        message = message.removeprefix("argument ").replace(": expected ", " is without a value: it takes ", 1)
        message = message.replace(": ignored explicit argument ", " takes no value, found ", 1)
        raise UsageError(f"{self.prog}: {message.replace('argument ', '')}; see {self.prog} --help")

    def _told_missing(self, names: Sequence[str]) -> str:
        takes = {self._named(action): self._takes(action) for action in self._actions}
        if len(names) == 1:
            return f"{names[0]} is missing, must be {takes[names[0]]}; add it"
        return f"{', '.join(f'{name} ({takes[name]})' for name in names)} are missing; add them"

    @staticmethod
    def _named(action: argparse.Action) -> str:
        """As argparse lists it where it is missing."""
        return "/".join(action.option_strings) or str(action.metavar or action.dest)

    @staticmethod
    def _takes(action: argparse.Action) -> str:
        """The values that a flag or a word takes, in words."""
        if action.choices is not None:
            return f"one of {', '.join(map(str, action.choices))}"
        if isinstance(action.type, NumberType):
            return str(action.type)
        return _LIMITS.get(action.type, "given")

    def _check_flags(self, words: Sequence[str]) -> None:
        """Refuse flags that are not there, before argparse misses the one that was meant."""
        if self.passes_on or self._subparsers is not None:
            return
        known = list(self._option_string_actions)
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                self.error(f"unknown flag {name}{near_match(name, known)}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        convert = self._registry_get("type", action.type, action.type)
        what = self._called(action)
        # What has no flag may be the words of another program's command line.
        if action.type in (None, str) and action.option_strings:
            self._check_name(arg_string, what)
        if convert in (Path, output_file) and not arg_string.strip():
            self.error(f"{what} is empty, must be {_FILE}; is a variable of the shell not set?")
        if convert is Path and Path(arg_string) == STDOUT:
            self.error(f"{what} is '-', must be {_FILE}; flags that write one file take '-'")
        try:
            return convert(arg_string)
        except argparse.ArgumentTypeError as error:
            self.error(f"{what} {error}")
        except ConfigError:
            raise
        except (TypeError, ValueError):
            limit = _LIMITS.get(convert, "what it takes")
            self.error(f"{what} is {_shown(arg_string)}, must be {limit}")

    def _check_name(self, text: str, what: str) -> None:
        try:
            check_name(text, what=what)
        except ConfigError as error:
            self.error(str(error))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = near_match(str(value), [str(each) for each in action.choices])
        self.error(f"{self._called(action)} is {_shown(str(value))}, must be {self._takes(action)}{hint}")

    @staticmethod
    def _called(action: argparse.Action) -> str:
        """The flag as users write it, or what stands for a word without one."""
        return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands below ``parser`` that have no commands of their own."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for command in group.choices.values():
            yield from leaves(command)
