"""Declares the flags of ``hetero discover``, for the command and for the process that looks."""

import argparse
from pathlib import Path

from hetero.errors import ConfigError
from hetero.standard_output import check_output, output_file

OUT = "cluster.yaml"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--out",
        type=output_file,
        default=Path(OUT),
        metavar="CLUSTER.yaml",
        help=f"write the cluster file here, on rank 0; - for stdout (default: {OUT})",
    )
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def check_options(args: argparse.Namespace) -> None:
    """Check the flags of :func:`add_options`, where the file is to be written.

    Raises:
        ConfigError: a file that is there already, is no YAML by its name, or cannot be written.
    """
    check_output(args.out, asked_by="--out", suffixes=(".yaml", ".yml"))
    if args.out.exists() and not args.force:
        raise ConfigError(f"--out {args.out}: it is there already; --force writes over it, or name another file")


def words_of(args: argparse.Namespace) -> list[str]:
    """The flags again, as they are typed."""
    return ["--out", str(args.out), *(["--force"] if args.force else [])]
