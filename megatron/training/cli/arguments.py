"""Reads the command line into a :class:`PretrainConfig`."""

import dataclasses
from collections.abc import Sequence

from hetero.errors import ConfigError
from megatron.training.cli.config import PRETRAIN, PretrainConfig
from megatron.training.cli.parser import read_flags
from megatron.training.cli.rules import check_flags


def parse_args(argv: Sequence[str]) -> PretrainConfig:
    """Read a command line, without the program's name, into a configuration.

    ``--help`` prints and exits.

    Raises:
        ConfigError: a flag is unknown, unsupported, missing, has no effect, contradicts another, or has a value out of
            range. The message has a line for each, with flag, value, limit and fix.
    """
    flags, problems = read_flags(argv)
    more, notes = check_flags(flags)
    if problems := list(dict.fromkeys([*problems, *more])):
        raise ConfigError("\n".join(problems))
    return PRETRAIN.read(dataclasses.replace(flags, notes=notes))
