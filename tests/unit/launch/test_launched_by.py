"""Whether a process is a rank of a launch, by what torchrun, srun, sbatch and salloc leave in the environment."""

import socket

import pytest

from hetero.errors import ConfigError
from hetero.launch.launched_by import first_host, launch_variables, node_name

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}

JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "gpu[01-04]", "SLURM_JOB_NUM_NODES": "4"}
TASK = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[02,04]",
    "SLURMD_NODENAME": "gpu04",
}
"""As Slurm 22.05 sets them for a step on a part of an allocation."""


def test_torchrun_says_all_itself() -> None:
    """Also inside of a task of Slurm."""
    expected = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    assert (
        launch_variables(TORCHRUN, command="hetero discover")
        == launch_variables(TASK | TORCHRUN, command="hetero discover")
        == expected
    )


def test_a_task_meets_on_the_first_node_of_its_step() -> None:
    assert launch_variables(TASK, command="hetero discover") == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu02",
        "MASTER_PORT": "24567",
    }
    given = launch_variables(TASK | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}, command="hetero discover")
    assert given is not None
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "1")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**JOB, "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    ],
    ids=["no launch", "one rank", "one task", "a batch script on its only node"],
)
def test_one_process_describes_its_host(environment: dict[str, str]) -> None:
    assert launch_variables(environment, command="hetero discover") is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (JOB, "this is a shell of Slurm job 1234567, which has 4 nodes; start it on every node: srun "),
        (JOB | {"SLURM_JOB_NUM_NODES": "1"}, "this is a shell of Slurm job 1234567, which has 1 node; start it on"),
        (JOB | {"SLURM_PROCID": "0"}, "this is the batch script of Slurm job 1234567, which has 4 nodes; start it on"),
        (
            JOB | {"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2"},
            "this is the batch script of Slurm job 1234567, which has 1 node in this component; start it on every node",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT; start"),
        (TORCHRUN | {"RANK": "first"}, "RANK is 'first', must be a whole number"),
        (
            {name: value for name, value in TASK.items() if "NODELIST" not in name},
            "Slurm says of no node list (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of task 0",
        ),
    ],
    ids=[
        "salloc",
        "salloc of one node",
        "sbatch",
        "sbatch of a heterogeneous job",
        "half of torchrun",
        "no number",
        "no node list",
    ],
)
def test_no_rank_of_a_launch(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_variables(environment, command="hetero discover")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu01,gpu02", "gpu01"),
        ("gpu[01-04,07],fat1", "gpu01"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[1-2]-ib,x", "rack1-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


def test_slurm_names_a_node_before_its_host_does() -> None:
    assert node_name(TASK) == "gpu04"
    assert node_name({}) == socket.gethostname()
