"""The ``hetero`` command line. Each command adds its own parser, see :mod:`hetero.commands`."""

import argparse
import importlib
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Sequence

from hetero.command_line import Parser, UsageError
from hetero.errors import HeteroError, PlanMemoryError

COMMANDS = {
    "plan": "hetero.commands.plan",
    "simulate": "hetero.commands.plan",
    "show": "hetero.commands.show",
    "validate": "hetero.commands.show",
    "profile": "hetero.commands.profile",
    "devices": "hetero.commands.devices",
    "discover": "hetero.commands.discover",
    "launch": "hetero.commands.launch",
    "sweep": "hetero.commands.sweep",
    "doctor": "hetero.commands.doctor",
    "elastic": "hetero.commands.elastic",
}
"""The module of each command. It has a function that adds the command's parser: ``add_`` and the command's name.

Only the module of the command that runs is imported: the planner takes two seconds, which an agent has no use for.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 if ``hetero doctor`` found a problem, or the reader of stdout left early; 2 after a mistake of the user's,
        3 if it is a plan that its devices have not the memory for, which are told on stderr.
    """
    parser = Parser(prog="hetero", description="Plans for training on GPUs that are not alike.")
    parser.add_argument(
        "--version", action="version", version=f"hetero {importlib.metadata.version('megatron-hetero')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    for command in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        getattr(importlib.import_module(COMMANDS[command]), f"add_{command}")(commands)
    try:
        args = parser.parse_args(words, argparse.Namespace(command_line=shlex.join(["hetero", *words])))
        exit_code = int(args.run(args))
        sys.stdout.flush()
        return exit_code
    except HeteroError as error:
        print(error if isinstance(error, UsageError) else f"hetero: {error}", file=sys.stderr)
        return 3 if isinstance(error, PlanMemoryError) else 2
    except BrokenPipeError:
        # A pager or ``head`` has seen enough; without this, Python complains when it flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
