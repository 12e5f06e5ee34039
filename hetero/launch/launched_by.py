"""Reads from the environment whether this process is a rank of a launch: of torchrun, or of srun."""

from collections.abc import Mapping

from hetero.errors import ConfigError
from hetero.slurm.controller import address_of_task_0
from hetero.slurm.job import SlurmJob, StepTask, hostnames, job_of

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Below the ports that Linux gives to connections, which begin at 32768."""

_STEPS_APART = 37
"""Distance of the ports of two jobs with consecutive numbers, so that their first steps have ports of their own. It has
no divisor in common with the number of ports, so that only every ten thousandth job has the same."""


def launch_variables(environment: Mapping[str, str], *, command: str) -> dict[str, str] | None:
    """Return ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` of this rank; ``None`` without a launch.

    torchrun sets them. For a task of srun they follow from its job: ranks meet at the node that runs task 0, by the
    address that Slurm has for it, and at a port that follows from the numbers of job and step. ``MASTER_ADDR`` and
    ``MASTER_PORT`` overrule both.

    Args:
        command: what to start on every node, for messages.

    Raises:
        ConfigError: a variable is missing or is no number; this process is no task of a step, but the shell or the
            batch script of a job with several nodes; or Slurm does not say where task 0 runs.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        variables = _of_torchrun(environment)
    elif (job := job_of(environment)) is None:
        return None
    elif job.task is None:
        _check_only_node(job, command)
        return None
    else:
        variables = _of_task(environment, job, job.task)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not variables[name].isdecimal():
            raise ConfigError(f"{name} is {variables[name]!r}, must be a whole number; start it with torchrun or srun")
    return None if variables["WORLD_SIZE"] == "1" else variables


def nodes_of_job(job: SlurmJob) -> list[str]:
    """Return the names of the nodes of all components of a job, in their order."""
    return [node for component in job.components for node in hostnames(component.node_list)]


def srun_line(job: SlurmJob, command: str) -> str:
    """Return the line that starts one task of a command on every node of a job, from its shell or any of its steps.

    A component of a heterogeneous job runs more tasks on a node if its allocation asked for more.
    """
    all_nodes = (
        f"--het-group=0-{len(job.components) - 1}" if job.is_heterogeneous else f"--ntasks={len(nodes_of_job(job))}"
    )
    overlap = "" if job.task is None else "--overlap "
    return f"srun {overlap}{all_nodes} --ntasks-per-node=1 {command}"


def local_rank(environment: Mapping[str, str]) -> int:
    """Return which of the ranks on its node this process is, by torchrun or srun; 0 without a launch."""
    if given := environment.get("LOCAL_RANK"):
        return int(given)
    job = job_of(environment)
    return job.task.local_task if job is not None and job.task is not None else 0


def _of_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if not environment.get(name)]:
        raise ConfigError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}; start it with torchrun")
    return {name: environment[name] for name in needed}


def _of_task(environment: Mapping[str, str], job: SlurmJob, task: StepTask) -> dict[str, str]:
    address = environment.get("MASTER_ADDR", "")
    if not address and task.num_tasks > 1 and not (address := address_of_task_0(job, task)):
        raise ConfigError(
            "Slurm does not name the nodes of this step (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of task 0"
        )
    port = _FIRST_PORT + (job.number * _STEPS_APART + int(task.step)) % _NUM_PORTS
    return {
        "RANK": str(task.task),
        "WORLD_SIZE": str(task.num_tasks),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def _check_only_node(job: SlurmJob, command: str) -> None:
    """Check that this process, which is no task of a step, runs on the only node of its job.

    Raises:
        ConfigError: the job has other nodes, or this is a shell on a host outside of it.
    """
    num_nodes = max(1, len(nodes_of_job(job)))
    if num_nodes == 1 and job.node is not None:
        return
    what = "the batch script" if job.is_batch_script else "a shell"
    raise ConfigError(
        f"this is {what} of Slurm job {job.name}, which has {num_nodes} node{'s' * (num_nodes > 1)}; start it on "
        f"every node: {srun_line(job, command)}"
    )
