"""Faults of a launch inside of an allocation of Slurm."""

from tests.planted_faults.fault import Fault

SLURM_LAUNCH_FAULTS = (
    Fault(
        name="any card that Slurm has given serves a node type",
        kind="missing check",
        file="hetero/launch/slurm_nodes.py",
        find="known=self._cluster.device_types) is not False",
        replace='known=self._cluster.device_types) != "no"',
        hints=("tests/unit/launch/test_slurm_nodes.py",),
    ),
    Fault(
        name="nodes that a user names are not looked at",
        kind="missing check",
        file="hetero/launch/slurm_nodes.py",
        find="        if lacking:\n            raise self._misfit(lacking)\n        return placed",
        replace="        if lacking and not hosts:\n            raise self._misfit(lacking)\n        return placed",
        hints=("tests/unit/launch/test_slurm_nodes.py",),
    ),
    Fault(
        name="ranks of a mixed node see the cards of both kinds",
        kind="missing option",
        file="hetero/launch/slurm_step.py",
        find="            visible_gpus=node.visible_gpus,\n",
        replace="",
        hints=("tests/unit/launch/test_slurm_step.py",),
    ),
    Fault(
        name="a step has the environment that the job was submitted with",
        kind="missing option",
        file="hetero/launch/slurm_step.py",
        find='words = ["srun", "--export=ALL", "--kill-on-bad-exit=1"]',
        replace='words = ["srun", "--kill-on-bad-exit=1"]',
        hints=("tests/unit/launch/test_slurm_step.py",),
    ),
    Fault(
        name="a job that has saved nothing since its start queues itself again",
        kind="wrong condition",
        file="hetero/launch/slurm_run.py",
        find="if saved is None or saved == first_saved:",
        replace="if saved is None:",
        hints=("tests/unit/launch/test_slurm_run.py",),
    ),
    Fault(
        name="all tasks of an array get the signal",
        kind="wrong name",
        file="hetero/slurm/controller.py",
        find="if job.is_heterogeneous else [job.name]",
        replace="if job.is_heterogeneous else [str(job.number)]",
        hints=("tests/unit/launch/test_slurm_run.py",),
    ),
    Fault(
        name="ranks of a cancelled job get a second signal",
        kind="wrong condition",
        file="hetero/launch/slurm_run.py",
        find="while step.poll() is None and is_running(job_fields(job)):",
        replace="while step.poll() is None:",
        hints=("tests/unit/launch/test_slurm_run.py",),
    ),
    Fault(
        name="a job to which Slurm is sending a signal counts as over",
        kind="wrong condition",
        file="hetero/slurm/controller.py",
        find='in ("RUNNING", "SIGNALING")',
        replace='== "RUNNING"',
        hints=("tests/unit/launch/test_slurm_run.py",),
    ),
)
