"""Says from the environment whether this process is a rank of a launch: torchrun's, or srun's."""

import re
import socket
from collections.abc import Mapping

from hetero.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Below the ports that Linux gives to connections, which begin at 32768."""


def node_name(environment: Mapping[str, str]) -> str:
    """What this node is called: by Slurm, whose nodes need not be called as their hosts are, else by the host."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def launch_variables(environment: Mapping[str, str], *, command: str) -> dict[str, str] | None:
    """``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` of this rank; ``None`` without a launch.

    torchrun sets them. Of a task that srun has started they follow from Slurm's variables: rank 0 is on the first node
    of the step, and the port from the job's number, unless they are set.

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
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    if world_size != "1" and not address:
        raise ConfigError("Slurm says of no node list (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of task 0")
    job = re.sub(r"\D", "", environment["SLURM_JOB_ID"]) or "0"
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_FIRST_PORT + int(job) % _NUM_PORTS),
    }


def first_host(node_list: str) -> str:
    """The first host of a list as Slurm writes it: ``gpu01`` of ``gpu[01-04,07],fat1``."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", node_list)
    return "".join(part or "" for part in found.groups()) if found else ""
