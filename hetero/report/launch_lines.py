"""The lines that start a report's plan, with made-up names where nobody has said which hosts they are."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from hetero.launch.hosts import invented_hosts
from hetero.launch.planned_flags import LEFT_TO_THE_USER, launch_flags, planned_flags
from hetero.launch.torchrun import TorchrunOptions, port_of_plan, shell_text
from hetero.plan.ir import Plan
from hetero.report.tables.launch import RankRow, rank_rows
from hetero.spec.cluster import ClusterSpec

MOST_HOSTS = 64
"""Hosts whose lines are shown."""

UNWRITTEN_PLAN = Path("plan.json")
"""What the lines call a plan that no file has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLines:
    """How a plan is started.

    command: the line that starts all hosts.
    printing: the one that prints who runs where, and each host's line, without starting anything.
    hosts: a title and torchrun's line for each of the first hosts.
    num_left_out: hosts behind those.
    ranks: which ranks of the first hosts hold what.
    """

    command: str
    printing: str
    hosts: tuple[tuple[str, str], ...]
    num_left_out: int
    ranks: tuple[RankRow, ...]


def launch_lines(plan: Plan, cluster: ClusterSpec, file: Path | None) -> LaunchLines:
    """The lines for ``plan`` in ``file``, ``None`` if it was not written; they end where the user's own flags begin."""
    path = UNWRITTEN_PLAN if file is None else file
    hosts = invented_hosts(cluster)
    flags = launch_flags(planned_flags(plan, path), ())
    options = TorchrunOptions(flags=flags, address=hosts[0].address, port=port_of_plan(plan))
    names = [
        f"{each.name}={','.join(host.name for host in hosts if host.node_type == each)}" for each in cluster.node_types
    ]
    own = " ".join(f"{name} ..." for name in LEFT_TO_THE_USER)
    asked = ["--hosts", *names] if len(hosts) > 1 else []
    command, printing = (
        f"{shlex.join(['hetero', 'launch', str(path), *asked, how])} -- {own}" for how in ("--run", "--print")
    )
    return LaunchLines(
        command=command,
        printing=printing,
        hosts=tuple(
            (f"{host.title}: {host.devices}", shell_text(options.words(host, num_nodes=len(hosts))) + " \\\n    " + own)
            for host in hosts[:MOST_HOSTS]
        ),
        num_left_out=max(0, len(hosts) - MOST_HOSTS),
        ranks=tuple(rank_rows(plan, hosts[:MOST_HOSTS])),
    )
