"""Faults of what becomes of a node that was asked to leave."""

from tests.planted_faults.fault import Fault

ELASTIC_LEAVE_FAULTS = (
    Fault(
        name="steps of earlier starts count as gained by this agent",
        kind="state",
        file="hetero/elastic/agent.py",
        find="            self._committed_before = self._membership.state.committed\n",
        replace="            pass\n",
        hints=("tests/elastic/test_ends.py",),
    ),
    Fault(
        name="a job that all nodes left without a new step is started again for ever",
        kind="condition",
        file="hetero/elastic/ends.py",
        find=" or (end.kind is End.FINISHED and resumes)",
        replace="",
        hints=("tests/elastic/test_ends.py",),
    ),
    Fault(
        name="a node cannot leave before the first epoch",
        kind="condition",
        file="hetero/elastic/job_store.py",
        find="            return self.stays_without(name)\n        if any(",
        replace="            return False\n        if any(",
        hints=("tests/elastic/test_ends.py",),
    ),
    Fault(
        name="one task of an array speaks for all",
        kind="wrong name",
        file="scripts/slurm/elastic.sbatch",
        find='job+="_$SLURM_ARRAY_TASK_ID"',
        replace="true",
        hints=("tests/elastic/test_slurm_array_tasks.py",),
    ),
    Fault(
        name="a task that gained nothing is queued again",
        kind="condition",
        file="scripts/slurm/elastic.sbatch",
        find="        0 | 1)\n",
        replace="        0 | 1 | 75)\n",
        hints=("tests/elastic/test_slurm_array_tasks.py",),
    ),
    Fault(
        name="etcd listens where its host alone reaches it",
        kind="wrong name",
        file="scripts/slurm/elastic_store.sbatch",
        find="$(node_address | head -n 1)",
        replace="$(hostname --ip-address)",
        hints=("tests/elastic/test_slurm_array_tasks.py",),
    ),
)
