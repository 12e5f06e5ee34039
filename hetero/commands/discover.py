"""``hetero discover`` describes this host, or under torchrun or srun all nodes, as a cluster file."""

import argparse
from typing import Any

from hetero.commands.child import run_in_child
from hetero.discovery.options import add_options, check_options, words_of


def add_discover(commands: Any) -> None:
    """Add the parser of ``hetero discover``."""
    parser = commands.add_parser(
        "discover",
        help="write the cluster file of this host, or of an allocation: srun --ntasks-per-node=1 hetero discover",
        description=(
            "Find out devices, memory, topology, networks and hosts, and write them as a cluster file, which says what "
            "could not be found out. This host alone; or all nodes of an allocation, one task on each is enough: "
            "srun --ntasks-per-node=1 hetero discover, or torchrun --nproc-per-node 1 --nnodes ... -m hetero discover."
        ),
    )
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_options(args)
    return run_in_child("hetero.discovery", words_of(args), args)
