"""Whether a process is a rank of a launch, by what torchrun, srun, sbatch and salloc leave in the environment."""

import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

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
        ("r[1-2]n[1-4]", "r1n1"),
        ("r[08-11]n[001-004,7]-ib,fat[1-2]", "r08n001-ib"),
        ("n[3,1],m[1-2]", "n3"),
        ("r[1-2][5-6]", "r15"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(node_list: str, first: str) -> None:
    assert first_host(node_list) == first


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's commands")
def test_the_first_host_is_the_one_that_scontrol_shows(tmp_path: Path) -> None:
    """Lists of one to three names with up to three brackets each, of padded and plain numbers; no daemon is asked."""
    rng = random.Random(36)

    def bracket() -> str:
        width, parts = rng.choice((1, 2, 3)), []
        for _ in range(rng.randint(1, 3)):
            start = rng.randint(0, 90)
            parts.append(rng.choice((f"{start:0{width}}", f"{start:0{width}}-{start + rng.randint(0, 4):0{width}}")))
        return f"[{','.join(parts)}]"

    def name() -> str:
        start = "".join(rng.choice(("n", "gpu-", "r3")) + bracket() for _ in range(rng.randint(0, 3)))
        return start or rng.choice(("login", "fat-7", "gpu-3.cluster"))

    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nNodeName=a CPUs=1\nPartitionName=p Nodes=a\n"
    )
    for _ in range(60):
        node_list = ",".join(name() for _ in range(rng.randint(1, 3)))
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", node_list],
            env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert first_host(node_list) == shown.stdout.split()[0], node_list


LAYOUT = """Job step layout:
\t12 tasks, 3 nodes (gpu[02-04])

\tNode 0 (gpu02), 4 task(s): 1 2 10 11
\tNode 1 (gpu03), 4 task(s): 3 4 5 6
\tNode 2 (gpu04), 4 task(s): 0 7 8 9
"""
"""As sattach of Slurm 22.05 writes it."""


@pytest.fixture
def sattach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the PATH with a stand-in for ``sattach``."""
    (tmp_path / "layout").write_text(LAYOUT)
    command = tmp_path / "sattach"
    command.write_text(f'#!/bin/sh\n[ "$*" = "--layout 1234567.0" ] && exec cat {tmp_path}/layout\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return command


def test_tasks_that_a_user_has_placed_meet_where_slurm_says_that_task_0_is(sattach: Path) -> None:
    placed = TASK | {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": "/home/me/hosts"}
    found = launch_variables(placed, command="hetero discover")
    assert found is not None
    assert found["MASTER_ADDR"] == "gpu04"
    cyclic = launch_variables(TASK | {"SLURM_DISTRIBUTION": "cyclic"}, command="hetero discover")
    assert cyclic is not None
    assert cyclic["MASTER_ADDR"] == "gpu02"
    given = launch_variables(placed | {"MASTER_ADDR": "here"}, command="hetero discover")
    assert given is not None
    assert given["MASTER_ADDR"] == "here"


@pytest.mark.parametrize("answer", ["#!/bin/sh\necho 'sattach: error: Invalid job id' >&2\nexit 1\n", None])
def test_a_placement_that_slurm_does_not_tell_asks_for_the_address(sattach: Path, answer: str | None) -> None:
    if answer is None:
        sattach.chmod(0o644)
        answer = "sattach"
    else:
        sattach.write_text(answer)
    with pytest.raises(ConfigError) as caught:
        launch_variables(TASK | {"SLURM_DISTRIBUTION": "arbitrary"}, command="hetero discover")
    assert "SLURM_HOSTFILE or --distribution=arbitrary" in str(caught.value)
    assert str(caught.value).endswith("set MASTER_ADDR to its host")


def test_slurm_names_a_node_before_its_host_does() -> None:
    assert node_name(TASK) == "gpu04"
    assert node_name({}) == socket.gethostname()
