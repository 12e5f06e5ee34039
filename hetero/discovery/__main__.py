"""Describes this host, or all nodes of a launch, as a cluster file; ``hetero discover`` calls it.

A process of its own: it imports torch where there is one, which ``hetero`` itself never does.
"""

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Sequence

from hetero.console import console
from hetero.discovery.cluster_yaml import cluster_yaml
from hetero.discovery.describe import describe
from hetero.discovery.facts import NodeFacts, nodes_of
from hetero.discovery.node import node_facts
from hetero.discovery.options import add_options, check_options
from hetero.discovery.report import print_found
from hetero.doctor.installed_torch import torch_facts_or_error
from hetero.errors import HeteroError
from hetero.extras import require
from hetero.launch.launched_by import launch_variables, nodes_of_job, srun_line
from hetero.slurm.job import job_of
from hetero.standard_output import STDOUT, add_output_options, answer, directed_output, tell_error, write_output


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 after a mistake of the user's, which stderr tells, on rank 0 alone if all have arrived."""
    parser = argparse.ArgumentParser(prog="python -m hetero.discovery", description=__doc__)
    add_options(parser)
    add_output_options(parser)
    args = parser.parse_args(argv)
    with directed_output(parser, args):
        return _discovered(args)


def _discovered(args: argparse.Namespace) -> int:
    try:
        launch = launch_variables(os.environ, command="hetero discover")
        if launch is None:
            return _described(args, lambda: [_own_facts()])
        require("train", asked_by="hetero discover on several ranks")
        os.environ.update(launch)
        return _together(args)
    except HeteroError as error:
        return _mistake(error)


def _together(args: argparse.Namespace) -> int:
    """As a rank of a launch: all tell their facts, and rank 0 describes them."""
    from hetero.distributed.launch_store import dismiss, dismissed, launch_store, tell, told_by_all

    store, rank, world_size = launch_store("discovery")
    if rank > 0:
        tell(store, _own_facts(), rank=rank)
        return dismissed(store, rank=rank)

    def facts() -> list[NodeFacts]:
        tell(store, _own_facts(), rank=rank)
        return told_by_all(store, NodeFacts, world_size=world_size)

    code = 2
    try:
        code = _described(args, facts)
    except HeteroError as error:
        code = _mistake(error)
    finally:
        dismiss(store, code, world_size=world_size)
    return code


def _described(args: argparse.Namespace, facts: Callable[[], list[NodeFacts]]) -> int:
    """Gather and write."""
    # Before anything that takes time.
    check_options(args)
    ranks = facts()
    nodes = nodes_of(ranks)
    date = datetime.date.today().isoformat()
    job = job_of(os.environ)
    found = describe(
        nodes,
        date=date,
        allocated=nodes_of_job(job) if job is not None else (),
        command=srun_line(job, "hetero discover") if job is not None else "",
    )
    text = cluster_yaml(
        found,
        heading=f"As hetero discover found it on {date}, on {len(ranks)} rank{'' if len(ranks) == 1 else 's'}. "
        "docs/cluster.md explains every field.",
    )
    write_output(args.out, text.encode())
    out = None if args.out == STDOUT else args.out
    print_found(found, console(), out=out)
    answer(args, lambda: {"written_to": out, "found": found})
    return 0


def _own_facts() -> NodeFacts:
    given = dict(os.environ)
    torch, error = torch_facts_or_error()
    return node_facts(given, torch, torch_error=error)


def _mistake(error: HeteroError) -> int:
    tell_error(error)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
