"""Writes a batch script for Slurm: what it asks of Slurm for each node type, and the launch that it runs."""

import shlex
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from hetero.launch.slurm_components import SlurmSite, job_request
from hetero.launch.torchrun import shell_assignments, shell_text
from hetero.printable import printable
from hetero.spec.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchScript:
    """A script for ``sbatch``.

    components: the node type of each component, in the job's order.
    notes: what a user should know before submitting it.
    """

    text: str
    components: tuple[str, ...]
    notes: tuple[str, ...]


_SET_FIRST = "set it before sbatch, which hands its environment on unless --export says otherwise"


def batch_script(
    cluster: ClusterSpec,
    launch: Sequence[str],
    *,
    flags: Sequence[str],
    environment: Mapping[str, str | None],
    sbatch_options: Sequence[str],
    made_by: str,
    site: SlurmSite | None = None,
) -> BatchScript:
    """Return a script for ``sbatch`` that launches the plan.

    Args:
        launch: words of ``hetero launch`` with the plan, without what to do with it.
        flags: of the program.
        environment: variables of the ranks by name; ``None`` stands for the value that the job's environment has.
        sbatch_options: ``account=me`` for all components, ``fast:constraint=a100`` for that of a node type.
        made_by: the line that asked for it.
        site: the Slurm that is to run it; ``None`` if it is not at hand.

    Raises:
        ConfigError: an option for a node type that the cluster does not have, or one that contradicts the plan.
    """
    job = job_request(cluster, sbatch_options, site)
    components = tuple(component.node_type.name for component in job.components)
    lines = ["#!/usr/bin/env bash", f"# Made by: {printable(made_by)}"]
    lines += [printable(f"# {line}") for line in job.why_this_order]
    for index, component in enumerate(job.components):
        lines += ["#SBATCH hetjob"] if index else _job_lines(component.options, requeues=goes_on(flags))
        lines += [f"#SBATCH --{shlex.quote(option)}" for option in component.lines]
    lines += ["set -euo pipefail"]
    lines += [f"export {each}" for each in shell_assignments(environment, fix=_SET_FIRST)]
    words = [*launch, *(word for name in environment for word in ("--env", name))]
    words += ["--components", ",".join(map(printable, components))] if len(components) > 1 else []
    lines += ["# exec: Slurm sends the SIGTERM to the process of this script."]
    lines += [f"exec {shell_text([*words, '--run', '--', *flags])}", ""]
    return BatchScript(text="\n".join(lines), components=components, notes=job.notes)


def goes_on(flags: Sequence[str]) -> bool:
    """Whether a program that is started again with the same flags goes on from where it was."""
    names = {word.partition("=")[0] for word in flags}
    return {"--save", "--load"} <= names


def _job_lines(given: Container[str], *, requeues: bool) -> list[str]:
    """Return the lines for the job as a whole, but for what a user has set."""
    lines = {
        "job-name": ["#SBATCH --job-name=hetero"],
        "output": ["#SBATCH --output=%x-%j.out"],
        "open-mode": ["#SBATCH --open-mode=append"],
        "signal": [
            "# Slurm sends SIGTERM to this shell alone, two minutes before the time is over.",
            "#SBATCH --signal=B:TERM@120",
        ],
        # A job that would start from the beginning is not queued again.
        "requeue": ["#SBATCH --requeue" if requeues else "#SBATCH --no-requeue"],
    }
    return [line for setting, of_setting in lines.items() if setting not in given for line in of_setting]
