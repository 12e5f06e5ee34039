"""Parses a command line into one value per flag, and says what is wrong with a word that is none."""

import argparse
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NoReturn

from hetero.errors import ConfigError
from hetero.serialization import near_match
from megatron.training.cli.config import FLAGS, GROUPS
from megatron.training.cli.fields import Flag, FlagValues
from megatron.training.cli.unsupported import UNSUPPORTED_FLAGS


def read_flags(argv: Sequence[str]) -> FlagValues:
    """Parse the command line into one value per flag. A flag given twice has its last value.

    ``--help`` prints and exits.

    Raises:
        ConfigError: a flag is unknown, or Megatron-LM's and not supported; a value is missing, or not what the flag
            takes.
    """
    parser = _parser()
    if "--help" in argv or "-h" in argv:
        parser.parse_args(["--help"])
    _check_names(argv)
    tokens = _with_negative_numbers_joined(argv)
    _check_each_value_has_a_flag(tokens)
    namespace = parser.parse_args(tokens)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}
    return FlagValues({flag.name: flag.default for flag in FLAGS} | given, frozenset(given))


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
        epilog="Every other flag of Megatron-LM is refused by name, with what to do instead.",
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


def _check_names(argv: Sequence[str]) -> None:
    """Refuse unknown and unsupported flags, all of them in one message."""
    switches = {name: flag.is_switch for flag in FLAGS for name in flag.names}
    known = [*switches, *UNSUPPORTED_FLAGS]
    problems = []
    for token in argv:
        if not token.startswith("-") or token == "-" or _is_number(token):
            continue
        name, equals, value = token.partition("=")
        if name in UNSUPPORTED_FLAGS:
            problems.append(f"{name} is not supported: {UNSUPPORTED_FLAGS[name]}")
        elif name not in switches:
            problems.append(f"unknown flag {name}{near_match(name, known) if name.strip('-') else ''}")
        elif equals and switches[name]:
            problems.append(f"{name} takes no value, found {value!r}")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _with_negative_numbers_joined(argv: Sequence[str]) -> list[str]:
    """Write ``--lr -1e-4`` as ``--lr=-1e-4``: argparse takes the first for two flags."""
    valued = {flag.name for flag in FLAGS if not flag.is_switch and not flag.many}
    tokens: list[str] = []
    for token in argv:
        if tokens and tokens[-1] in valued and token.startswith("-") and _is_number(token):
            tokens[-1] += f"={token}"
        else:
            tokens.append(token)
    return tokens


def _check_each_value_has_a_flag(tokens: Sequence[str]) -> None:
    flags = {name: flag for flag in FLAGS for name in flag.names}
    name, room = "", 0.0
    for token in tokens:
        if token.startswith("--"):
            name, equals, _ = token.partition("=")
            room = 0 if flags[name].is_switch or equals else math.inf if flags[name].many else 1
        elif room:
            room -= 1
        elif name and flags[name].is_switch:
            raise ConfigError(f"{name} takes no value, found {token!r}")
        else:
            place = f" after the value of {name}" if name else ""
            raise ConfigError(f"unexpected {token!r}{place}: put the name of its flag in front of it")


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True
