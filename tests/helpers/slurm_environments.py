"""Variables that Slurm 22.05.8 sets, as they were seen in every form of an allocation.

Recorded on nodes ``a1``, ``m1``, ``v1`` and ``v2``; without those that the project does not read.
"""

from collections.abc import Mapping

Environment = Mapping[str, str]


def task(number: int, node: str, nodes: str, *, of: int, step: int = 0) -> dict[str, str]:
    """What a task of a step adds to the variables of its job; ``nodes`` are those of the step, sorted."""
    return {
        "SLURMD_NODENAME": node,
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": str(of),
        "SLURM_PROCID": str(number),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(of),
    }


PLAIN = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "a1,m1,v2"}

HETEROGENEOUS = {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_ID_HET_GROUP_0": "5",
    "SLURM_JOB_ID_HET_GROUP_1": "6",
    "SLURM_JOB_ID_HET_GROUP_2": "7",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "v2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "m1",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "a1",
}

BATCH_SCRIPT = {"ENVIRONMENT": "BATCH", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"}
"""What a batch script has beside its job, its node and the number of tasks that the job asked for."""

OF_PLAIN_JOB = PLAIN | BATCH_SCRIPT | {"SLURMD_NODENAME": "a1", "SLURM_NTASKS": "3"}
STEP = PLAIN | task(1, "m1", "a1,m1,v2", of=3)
HOST_FILE = PLAIN | task(1, "a1", "a1,m1,v2", of=3, step=1) | {"SLURM_DISTRIBUTION": "arbitrary"}
"""``SLURM_HOSTFILE`` with v2, a1, m1."""

PARTS = PLAIN | task(2, "m1", "a1,m1,v2", of=3, step=2)
"""``srun -n1 -w v2 A : -n2 -w a1,m1 A``: task 0 is on v2, and nothing says so."""

SEVERAL_TASKS = PLAIN | task(5, "v2", "a1,m1,v2", of=6, step=3) | {"SLURM_LOCALID": "1"}
ONE_TASK = PLAIN | task(0, "a1", "a1", of=1, step=4)
"""``srun -N1 -n1 --pty bash``."""

OF_HETEROGENEOUS_JOB = (
    HETEROGENEOUS | BATCH_SCRIPT | {"SLURMD_NODENAME": "v2", "SLURM_JOB_NODELIST": "v2", "SLURM_NTASKS": "1"}
)
HETEROGENEOUS_STEP = HETEROGENEOUS | task(2, "a1", "a1,m1,v2", of=3) | {"SLURM_JOB_NODELIST": "a1,m1,v2"}
GROUP_1 = HETEROGENEOUS | task(0, "m1", "m1", of=1, step=1) | {"SLURM_JOB_NODELIST": "m1"}
GROUPS_0_AND_2 = HETEROGENEOUS | task(1, "a1", "a1,v2", of=2, step=2) | {"SLURM_JOB_NODELIST": "a1,v2"}

ARRAY_TASK_0 = {
    "SLURM_ARRAY_JOB_ID": "24",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_JOB_ID": "25",
    "SLURM_JOB_NODELIST": "a1,v1",
} | task(1, "v1", "a1,v1", of=2)
ARRAY_TASK_1 = ARRAY_TASK_0 | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "24"}
"""The task of an array of two that is split off last."""

SALLOC = {"SLURM_JOB_ID": "23", "SLURM_JOB_NODELIST": "a1,v1"}
INTERACTIVE = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "a1,v1"} | {
    "SLURMD_NODENAME": "a1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "a1",
    "SLURM_STEP_NUM_TASKS": "1",
}
"""The shell of ``salloc`` with ``LaunchParameters=use_interactive_step``."""

OTHER_JOB = {"SLURM_JOB_ID": "31", "SLURM_JOB_NODELIST": "m1", "SLURMD_NODENAME": "m1"}

SUBMITTED_FROM_STEP = task(0, "v1", "v1", of=1) | BATCH_SCRIPT | OTHER_JOB
SUBMITTED_FROM_INTERACTIVE_STEP = INTERACTIVE | BATCH_SCRIPT | OTHER_JOB
SUBMITTED_FROM_HETEROGENEOUS_JOB = HETEROGENEOUS | BATCH_SCRIPT | OTHER_JOB
SUBMITTED_FROM_ARRAY = {"SLURM_ARRAY_JOB_ID": "24", "SLURM_ARRAY_TASK_ID": "0"} | BATCH_SCRIPT | OTHER_JOB
"""Batch scripts of one job, submitted from inside of others."""
