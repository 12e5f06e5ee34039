"""Reads the command line into a :class:`PretrainConfig`."""

import dataclasses
from collections.abc import Sequence

from hetero.errors import ConfigError
from megatron.training.cli.config import PRETRAIN, PretrainConfig
from megatron.training.cli.parser import read_flags
from megatron.training.cli.rules import check_flags
from megatron.training.cli.yaml_config import with_yaml


def parse_args(argv: Sequence[str]) -> PretrainConfig:
    """Read a command line, without the program's name, into a configuration.

    ``--help`` prints and exits.

    Raises:
        ConfigError: the file of ``--yaml-cfg`` cannot be read; or a flag is unknown, unsupported, missing, has no
            effect, contradicts another, or has a value out of range. The message has a line for each, with flag,
            value, limit and fix.
    """
    words, from_file = with_yaml(argv)
    flags, problems = read_flags(words)
    more, notes = check_flags(dataclasses.replace(flags, from_file=from_file))
    if problems := list(dict.fromkeys([*problems, *more])):
        raise ConfigError("\n".join(problems))
    return PRETRAIN.read(dataclasses.replace(flags, notes=notes))
