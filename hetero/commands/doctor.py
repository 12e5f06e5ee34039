"""``hetero doctor`` looks at this host, and under torchrun at all hosts: what is missing, what differs, what to do."""

import argparse
from typing import Any

from hetero.commands.child import run_in_child
from hetero.doctor.options import add_options, words_of


def add_doctor(commands: Any) -> None:
    """Add the parser of ``hetero doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="check this host, or all hosts: torchrun ... -m hetero doctor",
        description=(
            "Check this host: versions, devices, limits, networks, variables; each line says what to do. All hosts of "
            "a cluster, and the links between them: torchrun --nproc-per-node 8 ... -m hetero doctor."
        ),
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    return run_in_child("hetero.doctor", words_of(args), args)
