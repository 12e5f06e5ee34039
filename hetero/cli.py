"""The ``hetero`` command line. Each command adds its own parser, see :mod:`hetero.commands`."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from hetero.command_line import Parser, UsageError, leaves
from hetero.errors import HeteroError, PlanMemoryError
from hetero.printable import printable_lines
from hetero.shown_secrets import shown_command, without_secrets
from hetero.standard_output import add_output_options, directed_output, tell_error
from hetero.version import VERSION

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
    "completion": "hetero.commands.completion",
}
"""The module of each command. It has a function that adds the command's parser: ``add_`` and the command's name.

Only the module of the command that runs is imported: the planner takes two seconds, which an agent has no use for.
"""

WITHOUT_JSON: Mapping[str, str] = MappingProxyType(
    {
        "elastic agent": "an agent runs until its job is over; hetero elastic status has --json",
        "elastic store": "etcd runs until it is ended; hetero elastic status has --json",
        "elastic run": "it runs until its job is over; hetero elastic status has --json",
        "completion": "it prints a script for a shell",
    }
)
"""By command, why it has no document. All others give one to :func:`hetero.standard_output.answer`."""


def command_parser(names: Iterable[str] = tuple(COMMANDS)) -> Parser:
    """The parser of ``hetero`` with the commands ``names``; each of them has ``--json`` and ``--quiet``."""
    parser = Parser(prog="hetero", description="Plans for training on GPUs that are not alike.")
    parser.add_argument("--version", action="version", version=f"hetero {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in names:
        getattr(importlib.import_module(COMMANDS[command]), f"add_{command}")(commands)
    for leaf in leaves(parser):
        add_output_options(leaf, why_no_json=WITHOUT_JSON.get(leaf.prog.removeprefix("hetero "), ""))
        leaf.set_defaults(parser=leaf)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 if ``hetero doctor`` found a problem, or the reader of stdout left early; 2 after a mistake of the user's,
        3 if it is a plan that its devices have not the memory for, which are told on stderr.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = command_parser(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    given = argparse.Namespace(command_line=shown_command(["hetero", *words]), all_commands=command_parser)
    try:
        args = parser.parse_args(words, given)
        with directed_output(args.parser, args):
            exit_code = int(args.run(args))
        sys.stdout.flush()
        return exit_code
    except HeteroError as error:
        if isinstance(error, UsageError):
            print(printable_lines(without_secrets(str(error))), file=sys.stderr)
        else:
            tell_error(error)
        return 3 if isinstance(error, PlanMemoryError) else 2
    except BrokenPipeError:
        # A pager or ``head`` has seen enough; without this, Python complains when it flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
