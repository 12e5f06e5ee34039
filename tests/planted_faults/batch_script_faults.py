"""Faults of what a batch script asks of Slurm."""

from tests.planted_faults.fault import Fault

BATCH_SCRIPT_FAULTS = (
    Fault(
        name="a batch script takes any generic resource for GPUs",
        kind="wrong condition",
        file="hetero/launch/sbatch_options.py",
        find='if words[0] != "gpu":',
        replace="if not words[0]:",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="a batch script asks for fewer GPUs than the plan uses",
        kind="missing check",
        file="hetero/launch/sbatch_options.py",
        find="if request.per_node < needed:",
        replace="if request.per_node < 1:",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="GPUs of a whole job are left to Slurm to spread",
        kind="wrong value",
        file="hetero/launch/sbatch_options.py",
        find="per_node=total // node_type.count, says_each_node=False)",
        replace="per_node=total // node_type.count)",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="an option for all node types overrules that of one",
        kind="order",
        file="hetero/launch/sbatch_options.py",
        find="for option in [*for_all, *own]}",
        replace="for option in [*own, *for_all]}",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="a GPU type is asked for that no node has enough of",
        kind="wrong condition",
        file="hetero/launch/slurm_components.py",
        find="num_nodes.get(gpu_type, 0) + (count >= node_type.gpus_per_node)",
        replace="num_nodes.get(gpu_type, 0) + 1",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="GPU types of nodes outside of the job's partition count",
        kind="wrong condition",
        file="hetero/launch/slurm_components.py",
        find='(value("partition") or site.default_partition or "")',
        replace='(site.default_partition or "")',
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="the component with the most nodes is placed first",
        kind="order",
        file="hetero/launch/slurm_components.py",
        find="last = max(reversed(left)",
        replace="last = min(reversed(left)",
        hints=("tests/unit/launch/test_slurm_batch_script.py",),
    ),
    Fault(
        name="srun takes a component's request for GPUs along with the step's",
        kind="missing rule",
        file="hetero/slurm/step_environment.py",
        find=" and not of_component.fullmatch(name)",
        replace="",
        hints=("tests/unit/launch/test_slurm_step.py",),
    ),
    Fault(
        name="options of a sweep are for clusters without their node type as well",
        kind="wrong condition",
        file="hetero/commands/sweep_plans.py",
        find='return [option for option in options if node_type_of(option) in ("", *_type_names(cluster))]',
        replace="return list(options)",
        hints=("tests/unit/sweep/test_jobs.py",),
    ),
    Fault(
        name="a sweep submits jobs while scripts are missing",
        kind="order",
        file="hetero/commands/sweep_plans.py",
        find="        for note in _write_script(row, combination, folder, launch):\n",
        replace="        if submits:\n            jobs |= _submitted([row], folder, say)\n"
        "        for note in _write_script(row, combination, folder, launch):\n",
        hints=("tests/unit/sweep/test_jobs.py",),
    ),
)
