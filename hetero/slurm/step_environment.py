"""Removes variables that ``srun`` would read as options.

``sbatch`` and ``salloc`` leave their options in the environment, where ``srun`` takes them for its own. In a
heterogeneous job it takes those of one component for all components.
"""

import re
from collections.abc import Mapping

from hetero.slurm.job import job_of

_OPTIONS = (
    # The step asks for these itself; GPUs with a type and GPUs without one exclude each other.
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "NTASKS_PER_GPU", "GRES", "TRES_PER_TASK"),
    *("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"),
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "TASKS_PER_NODE"),
    # A step that asks for processors of its own does not get all that the job has on a node.
    *("CPUS_PER_TASK", "CPUS_PER_GPU", "THREADS_PER_CORE", "EXACT", "EXCLUSIVE", "HINT"),
    *("CPU_BIND", "CPU_BIND_TYPE", "CPU_BIND_LIST", "CPU_BIND_VERBOSE", "GPU_BIND"),
    # The launch places its tasks itself.
    *("HOSTFILE", "DISTRIBUTION", "ARBITRARY_NODELIST"),
    # --export of sbatch must not keep the script's environment from the step.
    "EXPORT_ENV",
)


def environment_for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables that are options of ``srun``, and without those of another job.

    ``srun`` fails in a plain job that was submitted from a heterogeneous one, whose variables it still has.
    """
    # srun reads the variables of a component as options of that part of its line.
    of_component = re.compile(rf"SLURM_({'|'.join(_OPTIONS)})_(HET|PACK)_GROUP_\d+")
    dropped = {f"SLURM_{option}" for option in _OPTIONS} | {"SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"}
    job = job_of(environment)
    if job is not None and not job.is_heterogeneous:
        dropped |= {"SLURM_HET_SIZE", "SLURM_PACK_SIZE"}
    return {
        name: value for name, value in environment.items() if name not in dropped and not of_component.fullmatch(name)
    }
