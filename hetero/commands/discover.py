"""``hetero discover`` describes this host, or under torchrun or srun all nodes, as a cluster file."""

import argparse
import subprocess
import sys
from typing import Any

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
    """In a process of its own, which may import torch."""
    check_options(args)
    return subprocess.run([sys.executable, "-m", "hetero.discovery", *words_of(args)], check=False).returncode
