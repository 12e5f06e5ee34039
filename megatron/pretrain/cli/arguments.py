"""Reads the command line into a :class:`PretrainConfig`."""

import dataclasses
from collections.abc import Callable, Sequence

from hetero.errors import ConfigError
from megatron.pretrain.cli.config import PRETRAIN, PretrainConfig
from megatron.pretrain.cli.fields import FlagValues
from megatron.pretrain.cli.parser import read_flags
from megatron.pretrain.cli.rules import check_flags
from megatron.pretrain.cli.yaml_config import with_yaml


def parse_args(
    argv: Sequence[str], *, file_problems: Callable[[FlagValues], Sequence[str]] = lambda flags: ()
) -> PretrainConfig:
    """Read a command line, without the program's name, into a configuration.

    ``--help`` prints and exits.

    Args:
        file_problems: tells what is wrong with the files that the flags name. It comes before anything that needs
            torch, of which a configuration may ask what devices there are.

    Raises:
        ConfigError: the file of ``--yaml-cfg`` cannot be read; or a flag is unknown, unsupported, missing, has no
            effect, contradicts another, or has a value out of range. The message has a line for each, with flag,
            value, limit and fix.
    """
    words, from_file = with_yaml(argv)
    flags, problems = read_flags(words)
    more, notes = check_flags(dataclasses.replace(flags, from_file=from_file))
    if problems := list(dict.fromkeys([*problems, *more, *file_problems(flags)])):
        raise ConfigError("\n".join(problems))
    return PRETRAIN.read(dataclasses.replace(flags, notes=notes))
