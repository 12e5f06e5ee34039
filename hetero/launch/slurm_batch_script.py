"""Writes a batch script for Slurm: what it asks of Slurm for each node type, and the step that it runs."""

import re
import shlex
from collections.abc import Iterator, Sequence

from hetero.errors import ConfigError
from hetero.launch.slurm import goes_on, step_script
from hetero.launch.torchrun import TorchrunOptions
from hetero.printable import printable
from hetero.serialization import near_match
from hetero.spec.cluster import ClusterSpec, NodeType

_OPTION = re.compile(r"[a-z][a-z-]*(=[^\n]+)?")

_OF_THE_PLAN = ("nodes", "ntasks", "ntasks-per-node")

_OF_THE_JOB = [
    "#SBATCH --job-name=hetero",
    "#SBATCH --output=%x-%j.out",
    "#SBATCH --open-mode=append",
    "# Two minutes before the time is over, this shell is told.",
    "#SBATCH --signal=B:TERM@120",
]


def batch_script(cluster: ClusterSpec, options: TorchrunOptions, *, sbatch_options: Sequence[str], made_by: str) -> str:
    """A script for ``sbatch`` that launches the plan.

    Args:
        sbatch_options: ``account=me`` for all components, ``fast:constraint=a100`` for that of a node type.
        made_by: the line that asked for it.

    Raises:
        ConfigError: an option for a node type that the cluster has not.
    """
    lines = ["#!/usr/bin/env bash", f"# Made by: {printable(made_by)}"]
    components = [list(_component(each, sbatch_options)) for each in cluster.node_types]
    _check_types(cluster, sbatch_options)
    for index, component in enumerate(components):
        # A job that would begin anew is not to.
        requeue = "#SBATCH --requeue" if goes_on(options.flags) else "#SBATCH --no-requeue"
        lines += ["#SBATCH hetjob"] if index else [*_OF_THE_JOB, requeue]
        lines += [f"#SBATCH --{shlex.quote(option)}" for option in component]
    return "\n".join([*lines, "set -euo pipefail", "", step_script(cluster, options)])


def _component(node_type: NodeType, sbatch_options: Sequence[str]) -> Iterator[str]:
    """What one node type asks for."""
    own = [rest for name, rest in map(_typed, sbatch_options) if name in ("", node_type.name)]
    given = {option.partition("=")[0] for option in own}
    yield f"nodes={node_type.count}"
    yield "ntasks-per-node=1"
    if node_type.device != "cpu" and not given & {"gpus-per-node", "gres", "gpus"}:
        yield f"gpus-per-node={node_type.gpus_per_node}"
    yield "exclusive"
    yield from own


def _typed(option: str) -> tuple[str, str]:
    """A node type, empty for all, and the option. The value of that may have a colon as well."""
    name, colon, value = option.partition("=")
    node_type, _, name = name.rpartition(":")
    return node_type, name + colon + value


def _check_types(cluster: ClusterSpec, sbatch_options: Sequence[str]) -> None:
    known = [each.name for each in cluster.node_types]
    for option in sbatch_options:
        name, rest = _typed(option)
        if name and name not in known:
            hint = near_match(name, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"--sbatch-option {option}: unknown node type {name!r}{hint}")
        if (follows := rest.partition("=")[0]) in _OF_THE_PLAN:
            raise ConfigError(f"--sbatch-option {option}: {follows} follows from the plan; leave it out")
        if not _OPTION.fullmatch(rest):
            raise ConfigError(
                f"--sbatch-option {option}: must be a long option of sbatch without its dashes, such as "
                "TYPE:partition=NAME"
            )
