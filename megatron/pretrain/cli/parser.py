"""Parses a command line into one value per flag, and says what is wrong with each word that is none."""

import argparse
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

from hetero.errors import ConfigError
from hetero.serialization import near_match
from megatron.pretrain.cli.config import FLAGS, GROUPS
from megatron.pretrain.cli.fields import Flag, FlagValues
from megatron.pretrain.cli.flag_words import FlagWords, cut_by_flag, surplus_value
from megatron.pretrain.cli.unsupported import ASKS_FOR_NOTHING, UNSUPPORTED_FLAGS, asks_for_nothing
from megatron.pretrain.cli.without_effect import WITHOUT_EFFECT


def read_flags(argv: Sequence[str]) -> tuple[FlagValues, list[str]]:
    """Parse the command line into one value per flag. A flag given twice has its last value.

    ``--help`` prints and exits.

    Returns:
        The values; and what is wrong with each word, in the words of an error: a flag is unknown, or Megatron-LM's and
        not supported; a value is missing, or not what the flag takes.
    """
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.parse_args(["--help"])
    namespace, unreadable, notes = argparse.Namespace(), set(), {}
    problems: list[str] = []
    for words in cut_by_flag(argv):
        problem = _problem(words)
        if words.name in WITHOUT_EFFECT:
            notes[words.name] = WITHOUT_EFFECT[words.name].reason
        elif asks_for_nothing(words.name, words.values):
            notes[words.name] = ASKS_FOR_NOTHING
        elif problem is None:
            problem = _parse(parser, words, namespace)
        if problem is not None:
            problems.append(problem)
            unreadable |= {flag.name for flag in FLAGS if words.name in flag.names}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}
    values = {flag.name: flag.default for flag in FLAGS} | given
    return FlagValues(values, frozenset({*given, *unreadable}), frozenset(unreadable), notes), problems


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print before it exits with 2: a wrong flag is an error like any other here."""
        raise ConfigError(message.removeprefix("argument "))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s FLAGS",
        description="Pretrain a GPT model under the uniform plan of Megatron-LM's own flags, or under a plan file.",
        epilog="Every other flag of Megatron-LM is known by name: it has no effect here and is accepted with a "
        "warning, or it is refused with what to do instead. docs/megatron_flags.md lists them all.",
        allow_abbrev=False,
    )
    in_order = sorted(FLAGS, key=lambda flag: GROUPS.index(flag.group))
    for title, flags in itertools.groupby(in_order, key=lambda flag: flag.group.partition(":")[0]):
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    # Without SUPPRESS a default and a given value could not be told apart.
    help_text = flag.help.replace("%", "%%")
    if flag.type is None:
        group.add_argument(flag.name, dest=flag.name, action="store_true", default=argparse.SUPPRESS, help=help_text)
        if flag.off is not None:
            group.add_argument(
                flag.off, dest=flag.name, action="store_false", default=argparse.SUPPRESS, help=f"See {flag.name}."
            )
        return
    if flag.required:
        help_text += " Required."
    elif flag.default is not None and flag.default != ():
        help_text += f" Default: {flag.default}."
    group.add_argument(
        flag.name,
        dest=flag.name,
        type=flag.type,
        metavar=flag.type.shown,
        nargs="+" if flag.many else None,
        default=argparse.SUPPRESS,
        help=help_text,
    )


def _problem(words: FlagWords) -> str | None:
    """What is wrong with a flag's name or the number of its values."""
    name = words.name
    if not name:
        return f"unexpected {words.values[0]!r}: put the name of its flag in front of it"
    if asks_for_nothing(name, words.values):
        return None
    if name in UNSUPPORTED_FLAGS:
        return f"{name} is not supported: {UNSUPPORTED_FLAGS[name]}"
    most = _most_values().get(name)
    if most is None:
        known = [*_most_values(), *UNSUPPORTED_FLAGS]
        return f"unknown flag {name}{near_match(name, known) if name.strip('-') else ''}"
    return surplus_value(words, most)


@functools.cache
def _most_values() -> dict[str, float]:
    """How many values each flag takes that is accepted, with an effect or without."""
    most: dict[str, float] = {
        name: 0 if flag.is_switch else math.inf if flag.many else 1 for flag in FLAGS for name in flag.names
    }
    return most | {name: flag.most_values for name, flag in WITHOUT_EFFECT.items()}


def _parse(parser: argparse.ArgumentParser, words: FlagWords, namespace: argparse.Namespace) -> str | None:
    """Put the value of one flag into ``namespace``, or say what is wrong with it."""
    tokens = [words.name, *words.values]
    # argparse takes "--lr -1e-4" for two flags.
    if len(words.values) == 1:
        tokens = [f"{words.name}={words.values[0]}"]
    try:
        parser.parse_args(tokens, namespace)
    except ConfigError as error:
        return str(error)
    return None
