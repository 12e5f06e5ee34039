"""Says from the environment whether this process is a rank of a launch: torchrun's, or srun's."""

import re
import shlex
import socket
import subprocess
from collections.abc import Mapping

from hetero.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Below the ports that Linux gives to connections, which begin at 32768."""

_LAYOUT_S = 30.0
"""For Slurm's controller to answer."""

_HAS_TASK_0 = re.compile(r"Node \d+ \((\S+)\), \d+ task\(s\): 0\b")
"""A line of ``sattach --layout``, which lists the tasks of each node in ascending order."""


def node_name(environment: Mapping[str, str]) -> str:
    """What this node is called: by Slurm, whose nodes need not be called as their hosts are, else by the host."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def launch_variables(environment: Mapping[str, str], *, command: str) -> dict[str, str] | None:
    """``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` of this rank; ``None`` without a launch.

    torchrun sets them. Of a task that srun has started they follow from Slurm's variables, unless they are set: rank 0
    is on the first node of the step, or where Slurm says that task 0 is if a user has placed the tasks (SLURM_HOSTFILE,
    ``--distribution=arbitrary``); the port follows from the job's number.

    Args:
        command: that is to be started on every node, as messages say it.

    Raises:
        ConfigError: a variable is missing or no number, or this is no task of a step but the shell or the batch script
            of an allocation of several nodes.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in needed if not environment.get(name)]:
            raise ConfigError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}; start it with torchrun")
        variables = {name: environment[name] for name in needed}
    elif "SLURM_JOB_ID" not in environment:
        return None
    elif "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        _check_one_node(environment, command)
        return None
    else:
        variables = _of_step(environment)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not variables[name].isdecimal():
            raise ConfigError(f"{name} is {variables[name]!r}, must be a whole number; start it with torchrun or srun")
    return None if variables["WORLD_SIZE"] == "1" else variables


def _check_one_node(environment: Mapping[str, str], command: str) -> None:
    """That a batch script is on the only node of its allocation; the shell of ``salloc`` is on none."""
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    # The batch script of a heterogeneous job is told of its own component alone.
    is_one_of_several = environment.get("SLURM_HET_SIZE", "1") != "1"
    if "SLURM_PROCID" not in environment or nodes != "1" or is_one_of_several:
        where = "the batch script" if "SLURM_PROCID" in environment else "a shell"
        raise ConfigError(
            f"this is {where} of Slurm job {environment['SLURM_JOB_ID']}, which has {nodes} "
            f"node{'' if nodes == '1' else 's'}{' in this component' if is_one_of_several else ''}; start it on "
            f"every node: srun --ntasks-per-node=1 {command}"
        )


def _of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a task of a step; tasks and nodes of a heterogeneous step are those of all its components together."""
    world_size = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    address = environment.get("MASTER_ADDR") or ("" if world_size == "1" else _host_of_task_0(environment))
    if world_size != "1" and not address:
        raise ConfigError("Slurm says of no node list (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of task 0")
    job = re.sub(r"\D", "", environment["SLURM_JOB_ID"]) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + int(job) % _NUM_PORTS),
    }


def _host_of_task_0(environment: Mapping[str, str]) -> str:
    """Return the host of task 0 of a step, empty if Slurm says of none.

    The node list of a step is sorted. Its first node has task 0 in every distribution but ``arbitrary``.

    Raises:
        ConfigError: tasks were placed by a user, and Slurm does not say where.
    """
    if not environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return first_host(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "")
    asked = ["sattach", "--layout", f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=_LAYOUT_S)
        said = (done.stdout if done.returncode == 0 else done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if found := _HAS_TASK_0.search(said):
        return found[1]
    raise ConfigError(
        "tasks of this step are where a user has placed them (SLURM_HOSTFILE or --distribution=arbitrary), and "
        f"{shlex.join(asked)!r} does not say where task 0 is ({said.splitlines()[-1] if said else 'no answer'}); set "
        "MASTER_ADDR to its host"
    )


def first_host(node_list: str) -> str:
    """Return the first host of a list as Slurm writes it: ``r1n01-ib`` of ``r[1-2]n[01-04,07]-ib,fat1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    assert first is not None, "matches an empty text as well"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
