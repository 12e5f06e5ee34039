"""Takes out of an environment what ``srun`` would read there against the options that it is given.

``sbatch`` and ``salloc`` leave their options as variables, which ``srun`` takes for its own: of a heterogeneous job
those of one component, for all of them.
"""

import re
from collections.abc import Mapping

from hetero.slurm.job import job_of

_OPTIONS = (
    # Asked for by the step itself; GPUs with and without a type exclude one another.
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "NTASKS_PER_GPU", "GRES", "TRES_PER_TASK"),
    *("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE"),
    *("NTASKS", "NPROCS", "NTASKS_PER_NODE", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "TASKS_PER_NODE"),
    # A step that asks for processors of its own does not get all that the job has on a node.
    *("CPUS_PER_TASK", "CPUS_PER_GPU", "THREADS_PER_CORE", "EXACT", "EXCLUSIVE", "HINT"),
    *("CPU_BIND", "CPU_BIND_TYPE", "CPU_BIND_LIST", "CPU_BIND_VERBOSE", "GPU_BIND"),
    # Where tasks are follows from the nodes.
    *("HOSTFILE", "DISTRIBUTION", "ARBITRARY_NODELIST"),
    # Whatever a job was submitted with, its step has the environment of its script.
    "EXPORT_ENV",
)


def environment_for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without Slurm's variables that are options of ``srun``, and those of another job.

    A job that was submitted from inside of a heterogeneous one has the variables of that one, with which ``srun`` ends.
    """
    # srun reads those of a component for its part: GPUs of a type there exclude others without one.
    of_component = re.compile(rf"SLURM_({'|'.join(_OPTIONS)})_(HET|PACK)_GROUP_\d+")
    dropped = {f"SLURM_{option}" for option in _OPTIONS} | {"SRUN_CPUS_PER_TASK", "SRUN_EXPORT_ENV"}
    job = job_of(environment)
    if job is not None and not job.is_heterogeneous:
        dropped |= {"SLURM_HET_SIZE", "SLURM_PACK_SIZE"}
    return {
        name: value for name, value in environment.items() if name not in dropped and not of_component.fullmatch(name)
    }
