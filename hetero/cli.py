"""The ``hetero`` command line. Each command adds its own parser, see :mod:`hetero.commands`."""

import argparse
import os
import sys
from collections.abc import Sequence

from hetero.commands.devices import add_devices
from hetero.commands.doctor import add_doctor
from hetero.commands.elastic import add_elastic
from hetero.commands.plan import add_plan, add_simulate
from hetero.commands.profile import add_profile
from hetero.commands.show import add_show, add_validate
from hetero.errors import HeteroError, PlanMemoryError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; 1 if ``hetero doctor`` found a problem, or the reader of stdout left early; 2 after a mistake of the user's,
        3 if it is a plan that its devices have not the memory for, which are told on stderr.
    """
    parser = argparse.ArgumentParser(prog="hetero", description="Plans for training on GPUs that are not alike.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in (
        add_plan,
        add_simulate,
        add_show,
        add_validate,
        add_profile,
        add_devices,
        add_doctor,
        add_elastic,
    ):
        add_command(commands)
    args = parser.parse_args(argv)
    try:
        exit_code = int(args.run(args))
        sys.stdout.flush()
        return exit_code
    except HeteroError as error:
        print(f"hetero: {error}", file=sys.stderr)
        return 3 if isinstance(error, PlanMemoryError) else 2
    except BrokenPipeError:
        # A pager or ``head`` has seen enough; without this, Python complains when it flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
