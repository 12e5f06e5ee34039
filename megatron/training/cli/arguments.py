"""Reads the command line into a :class:`PretrainConfig`."""

from collections.abc import Sequence

from megatron.training.cli.config import PRETRAIN, PretrainConfig
from megatron.training.cli.parser import read_flags
from megatron.training.cli.rules import check_flags


def parse_args(argv: Sequence[str]) -> PretrainConfig:
    """Read a command line, without the program's name, into a configuration.

    ``--help`` prints and exits.

    Raises:
        ConfigError: a flag is unknown, unsupported, missing, has no effect, contradicts another, or has a value out of
            range. The message names flag, value, limit and fix.
    """
    flags = read_flags(argv)
    check_flags(flags)
    return PRETRAIN.read(flags)
