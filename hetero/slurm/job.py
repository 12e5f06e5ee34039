"""Reads Slurm's variables: the job that this process runs in, and the task of a step that it is, if it is one.

No other module reads them. They differ between the forms of an allocation (seen with Slurm 22.05):

* In the task of a job array that is split off last, ``SLURM_JOB_ID`` is the number of the whole array, and by it
  ``squeue``, ``scancel`` and ``scontrol`` mean all tasks. ``ARRAY_TASK`` names one.
* In a step of a heterogeneous job, ``SLURM_JOB_NODELIST`` and ``SLURM_STEP_NODELIST`` are sorted lists over all
  components, and ``SLURM_PROCID`` counts over the components in their order. The variables that end in
  ``_HET_GROUP_n`` are those of one component.
* The shell of ``salloc`` is a step of its own where a site sets ``LaunchParameters=use_interactive_step``.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.errors import ConfigError

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Steps from here on are no ``srun``'s: the interactive one (``0xFFFFFFFA``), the batch script and the like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobComponent:
    """A part of a job that asked for nodes of its own; a plain job has one.

    number: of the component's job, without that of a task of an array.
    node_list: as Slurm shortens it, such as ``gpu[0-3]``.
    """

    number: str
    node_list: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTask:
    """The task of a step of ``srun`` that this process is.

    step: its number in the job.
    task, num_tasks: over all components of the job that take part.
    local_task: among the tasks on this node.
    node_list: the nodes of the step, sorted.
    is_placed_by_user: whether tasks are where a user has put them (``SLURM_HOSTFILE``, ``--distribution=arbitrary``).
    """

    step: str
    task: int
    num_tasks: int
    local_task: int
    node_list: str
    is_placed_by_user: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """The job that this process runs in.

    name: what commands of Slurm take for it, and for no other task of its array: ``7``, or ``7_2``.
    number: a number that no other running job has.
    components: of the job, in its order.
    task: ``None`` in a batch script and in the shell of an allocation.
    is_batch_script: whether this is the job's own script, or has come from it.
    """

    name: str
    number: int
    components: tuple[JobComponent, ...]
    task: StepTask | None
    is_batch_script: bool

    @property
    def is_heterogeneous(self) -> bool:
        """Whether it has several components."""
        return len(self.components) > 1


def node_name(environment: Mapping[str, str]) -> str:
    """What this node is called: by Slurm, whose nodes need not be called as their hosts are, else by the host."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def job_of(environment: Mapping[str, str]) -> SlurmJob | None:
    """The job of a process with these variables; ``None`` outside of Slurm.

    Raises:
        ConfigError: a variable is not what Slurm sets.
    """
    if not environment.get("SLURM_JOB_ID"):
        return None
    number = _number(environment, "SLURM_JOB_ID")
    name = str(number)
    if environment.get("SLURM_ARRAY_TASK_ID"):
        array, task = (_number(environment, f"SLURM_ARRAY_{each}_ID") for each in ("JOB", "TASK"))
        name = f"{array}_{task}"
    return SlurmJob(
        name=name,
        number=number,
        components=_components(environment, number),
        task=_task(environment),
        is_batch_script="SLURM_STEP_ID" not in environment and "SLURM_PROCID" in environment,
    )


def _components(environment: Mapping[str, str], number: int) -> tuple[JobComponent, ...]:
    size = _number(environment, "SLURM_HET_SIZE", "1")
    if size == 1:
        node_list = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or ""
        return (JobComponent(number=str(number), node_list=node_list),)
    return tuple(
        JobComponent(
            number=str(_number(environment, f"SLURM_JOB_ID_HET_GROUP_{i}", str(number + i))),
            node_list=environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", ""),
        )
        for i in range(size)
    )


def _task(environment: Mapping[str, str]) -> StepTask | None:
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    step = _number(environment, "SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return None
    num_tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    return StepTask(
        step=str(step),
        task=_number(environment, "SLURM_PROCID"),
        num_tasks=_number(environment, num_tasks, "1"),
        local_task=_number(environment, "SLURM_LOCALID", "0"),
        node_list=environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "",
        is_placed_by_user=environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"),
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list as Slurm writes it: ``r1n01-ib`` of ``r[1-2]n[01-04,07]-ib,fat1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None, "matches an empty text as well"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        said = "not set" if text is None else repr(text)
        raise ConfigError(f"environment: {name} is {said}, must be a whole number; is this an allocation of Slurm?")
    return int(text)
