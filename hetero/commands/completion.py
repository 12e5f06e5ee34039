"""``hetero completion`` prints the script with which a shell completes commands, flags and files."""

import argparse
from pathlib import Path
from typing import Any

import shtab

from hetero.command_line import leaves
from hetero.standard_output import STDOUT, output_file, write_output

SHELLS = ("bash", "zsh", "fish")


def add_completion(commands: Any) -> None:
    """Add the parser of ``hetero completion``."""
    parser = commands.add_parser(
        "completion",
        help="print what completes hetero's commands, flags and files in a shell",
        description="Print a script for a shell; docs/install.md says where it goes.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> int:
    script = completion_script(args.all_commands(), args.shell)
    write_output(STDOUT, f"{script.rstrip()}\n".encode())
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of one of :data:`SHELLS` that completes what ``parser`` takes; paths complete as files."""
    for leaf in leaves(parser):
        for action in leaf._actions:
            if action.type in (Path, output_file) and not hasattr(action, "complete"):
                paths = shtab.DIRECTORY if action.metavar in ("FOLDER", "LOGS") else shtab.FILE
                action.complete = paths  # type: ignore[attr-defined]  # shtab looks for it, argparse does not declare it
    return shtab.complete(parser, shell=shell)
