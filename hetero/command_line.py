"""Reads command lines, and says in one line what is wrong with one: the flag, its value, what it takes."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from hetero.errors import ConfigError
from hetero.serialization import near_match
from hetero.standard_output import STDOUT, output_file

_MAX_SHOWN = 60
"""Characters of a wrong value that a message repeats."""

_LIMITS: Mapping[Any, str] = MappingProxyType(
    {int: "a whole number, without a unit", float: "a number, without a unit"}
)
"""By the type of a flag, what it takes."""


class UsageError(ConfigError):
    """A command line is wrong; the message begins with the name of the program."""


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of a flag that takes whole numbers from ``least`` on, up to ``most``."""

    def parse(text: str) -> int:
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {_shown(text)}, must be {_LIMITS[int]}, {limit}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"is {value}, must be {limit}")
        return value

    return parse


def number(limit: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of a flag that takes the numbers that ``accepts`` lets pass; ``limit`` puts that into words."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"is {_shown(text)}, must be {_LIMITS[float]}, {limit}") from None
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"is {text}, must be {limit}")
        return value

    return parse


ABOVE_0 = number("above 0", lambda value: value > 0)
FROM_0 = number("at least 0", lambda value: value >= 0)
BELOW_1 = number("at least 0 and below 1", lambda value: 0 <= value < 1)
COUNT = whole_number(1)
PORT = whole_number(1, 2**16 - 1)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


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
        if args is None:
            return super().parse_known_args(args, namespace)
        words = list(args)
        own = words.index("--") if "--" in words else len(words)
        self._check_flags(words[:own])
        if own == len(words) or self.get_default("flags") is None:
            return super().parse_known_args(words, namespace)
        found, unknown = super().parse_known_args(words[:own], namespace)
        found.flags = words[own + 1 :]
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits.

        Raises:
            ConfigError: always.
        """
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            message = f"{missing} {'are missing; add them' if ', ' in missing else 'is missing; add it'}"
        stray = message.removeprefix("unrecognized arguments: ")
        if stray != message:
            message = f"unexpected {stray!r}; put the name of its flag before it, or leave it out"
        first, conflicts, second = message.partition(": not allowed with argument ")
        if conflicts:
            message = f"{first} and {second} exclude each other; leave one out"
        message = message.removeprefix("argument ").replace(": expected ", " is without a value: it takes ", 1)
        raise UsageError(f"{self.prog}: {message.replace('argument ', '')}; see {self.prog} --help")

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
        if convert in (Path, output_file) and not arg_string.strip():
            self.error(f"{what} is empty, must be a file or a folder; is a variable of the shell not set?")
        if convert is Path and Path(arg_string) == STDOUT:
            self.error(f"{what} is '-', must be a file or a folder; flags that write one file take '-'")
        try:
            return convert(arg_string)
        except argparse.ArgumentTypeError as error:
            self.error(f"{what} {error}")
        except ConfigError:
            raise
        except (TypeError, ValueError):
            limit = _LIMITS.get(convert, "what it takes")
            self.error(f"{what} is {_shown(arg_string)}, must be {limit}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        hint = near_match(str(value), known)
        self.error(f"{self._called(action)} is {_shown(str(value))}, must be one of {', '.join(known)}{hint}")

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
