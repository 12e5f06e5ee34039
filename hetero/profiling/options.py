"""Declares the flags of ``hetero profile host``, for the command and for the process that measures."""

import argparse

from hetero.errors import ConfigError
from hetero.standard_output import check_output, output_file

SECONDS = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--out",
        type=output_file,
        metavar="FILE.json",
        help="write what is to stand under host of a node type here; - for standard output",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help=f"measure for so long, shared by all measurements (default: {SECONDS:g})",
    )


def check_options(args: argparse.Namespace) -> None:
    """Check the flags of :func:`add_options`.

    Raises:
        ConfigError: no time to measure in, or a file that cannot be written.
    """
    if not args.seconds > 0:
        raise ConfigError(f"--seconds is {args.seconds:g}, must be above 0")
    if args.out is not None:
        check_output(args.out, asked_by="--out", suffixes=(".json",))


def words_of(args: argparse.Namespace) -> list[str]:
    """The flags again, as they are typed."""
    return [*(["--out", str(args.out)] if args.out is not None else []), "--seconds", str(args.seconds)]
