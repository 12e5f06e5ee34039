"""Reads Slurm's variables: the job that this process runs in, and the task of a step that it is, if it is one.

No other module reads them. They differ between the forms of an allocation (seen with Slurm 22.05):

* In the task of a job array that is split off last, ``SLURM_JOB_ID`` is the number of the whole array, and by it
  ``squeue``, ``scancel`` and ``scontrol`` mean all tasks. ``ARRAY_TASK`` names one. All other tasks have a number of
  their own.
* In a step of a heterogeneous job, ``SLURM_JOB_NODELIST`` and ``SLURM_STEP_NODELIST`` are sorted lists over all
  components, and ``SLURM_PROCID`` counts over the components in their order. The variables that end in
  ``_HET_GROUP_n`` are those of one component.
* The shell of ``salloc`` is a step of its own where a site sets ``LaunchParameters=use_interactive_step``.
* ``sbatch`` hands on the variables of its caller. A job that is submitted from inside of another one has that job's
  ``SLURM_ARRAY_...``, ``SLURM_STEP_...`` and ``SLURM_HET_...``, unless it is an array, a step or heterogeneous itself.
"""

import itertools
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

    name: what commands of Slurm take for it, and for no other task of its array: ``7``, or ``7_2`` of the last task.
    number: a number that no other running job has.
    components: of the job, in its order.
    node: that this process runs on, as Slurm calls it; ``None`` in a shell of ``salloc`` on a host outside of the job.
    task: ``None`` in a batch script and in the shell of an allocation.
    is_batch_script: whether this is the job's own script, or has come from it.
    """

    name: str
    number: int
    components: tuple[JobComponent, ...]
    node: str | None = None
    task: StepTask | None = None
    is_batch_script: bool = False

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
    if environment.get("SLURM_ARRAY_JOB_ID") == name:
        name = f"{name}_{_number(environment, 'SLURM_ARRAY_TASK_ID')}"
    task = _task(environment)
    return SlurmJob(
        name=name,
        number=number,
        components=_components(environment, number),
        node=environment.get("SLURMD_NODENAME") or None,
        task=task,
        is_batch_script=task is None and "SLURM_PROCID" in environment and not _is_in_interactive_step(environment),
    )


def _components(environment: Mapping[str, str], number: int) -> tuple[JobComponent, ...]:
    size = _number(environment, "SLURM_HET_SIZE", "1")
    numbers = [str(_number(environment, f"SLURM_JOB_ID_HET_GROUP_{i}", str(number + i))) for i in range(size)]
    if size == 1 or str(number) not in numbers:
        node_list = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or ""
        return (JobComponent(number=str(number), node_list=node_list),)
    return tuple(
        JobComponent(number=component, node_list=environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", ""))
        for i, component in enumerate(numbers)
    )


def _task(environment: Mapping[str, str]) -> StepTask | None:
    step = _step(environment)
    if step is None or step >= _FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environment:
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


def _is_in_interactive_step(environment: Mapping[str, str]) -> bool:
    step = _step(environment)
    return step is not None and step >= _FIRST_SPECIAL_STEP and environment.get("ENVIRONMENT") != "BATCH"


def _step(environment: Mapping[str, str]) -> int | None:
    """Return the number of the step that this process is in; ``None`` if it is in none."""
    if "SLURM_STEP_ID" not in environment:
        return None
    node = environment.get("SLURMD_NODENAME", "")
    of_step, of_job = (set(hostnames(environment.get(f"SLURM_{each}_NODELIST", ""))) for each in ("STEP", "JOB"))
    if of_step and of_job and (not of_step <= of_job or node in of_job - of_step):
        # It is the step that submitted this job.
        return None
    return _number(environment, "SLURM_STEP_ID")


def hostnames(node_list: str) -> list[str]:
    """Return the hosts of a list as Slurm shortens it, in its order: ``r1n01, r1n02, fat1`` of ``r1n[01-02],fat1``.

    Needs none of Slurm's commands, which containers do not have.
    """
    return [
        "".join(parts)
        for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
        for parts in itertools.product(*map(_alternatives, re.findall(r"\[[^\]]*\]|[^\[]+", word)))
    ]


def _alternatives(part: str) -> list[str]:
    """Return what a part of a name stands for: ``08, 09, 10`` of ``[08-10]``, itself without brackets."""
    if not part.startswith("["):
        return [part]
    numbers = []
    for alternative in part[1:-1].split(","):
        first, _, last = alternative.partition("-")
        if last:
            numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        else:
            numbers.append(first)
    return numbers


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None or not text.isdecimal():
        said = "not set" if text is None else repr(text)
        raise ConfigError(f"environment: {name} is {said}, must be a whole number; is this an allocation of Slurm?")
    return int(text)
