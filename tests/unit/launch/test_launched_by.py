"""Whether a process is a rank of a launch, by what torchrun, srun, sbatch and salloc leave in the environment."""

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.launched_by import launch_variables, local_rank, srun_line
from hetero.slurm.job import job_of
from tests.helpers import slurm_environments as seen

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}

LAYOUTS = {
    "8.0": "Node 0 (a1), 1 task(s): 0\nNode 1 (m1), 1 task(s): 1\nNode 2 (v2), 1 task(s): 2",
    "8.1": "Node 0 (a1), 1 task(s): 1\nNode 1 (m1), 1 task(s): 2\nNode 2 (v2), 1 task(s): 0",
    "8.2": "Node 0 (v2), 1 task(s): 0",
    "8.3": "Node 0 (a1), 2 task(s): 0 1\nNode 1 (m1), 2 task(s): 2 3\nNode 2 (v2), 2 task(s): 4 5",
    "5.0": "Node 0 (v2), 1 task(s): 0",
    "5.2": "Node 0 (v2), 1 task(s): 0",
    "7.2": "Node 0 (a1), 1 task(s): 0",
    "24.0": "Node 0 (a1), 1 task(s): 0\nNode 1 (v1), 1 task(s): 1",
    "25.0": "Node 0 (a1), 1 task(s): 0\nNode 1 (v1), 1 task(s): 1",
}
"""Of ``sattach --layout``, for the steps of :mod:`tests.helpers.slurm_environments`."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the PATH, with stand-ins for ``sattach`` and ``scontrol``."""
    (tmp_path / "layouts").mkdir()
    for step, layout in LAYOUTS.items():
        (tmp_path / "layouts" / step).write_text(f"Job step layout:\n{layout}\n")
    scripts = {
        "sattach": f'exec /bin/cat "{tmp_path}/layouts/$2"\n',
        # show node NAME
        "scontrol": 'echo "NodeName=$4 NodeAddr=10.77.0.$4 NodeHostName=$4 Version=22.05.8"\n',
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = launch_variables(environment, command="hetero discover")
    assert found is not None
    return found


def test_torchrun_says_all_itself() -> None:
    """Also inside of a task of Slurm."""
    expected = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"}
    assert variables(TORCHRUN) == variables({**seen.STEP, **TORCHRUN}) == expected


@pytest.mark.parametrize(
    ("environment", "rank", "of", "node"),
    [
        (seen.STEP, 1, 3, "a1"),
        (seen.HOST_FILE, 1, 3, "v2"),
        (seen.PARTS, 2, 3, "v2"),
        (seen.SEVERAL_TASKS, 5, 6, "a1"),
        (seen.HETEROGENEOUS_STEP, 2, 3, "v2"),
        (seen.GROUPS_0_AND_2, 1, 2, "v2"),
        (seen.ARRAY_TASK_0, 1, 2, "a1"),
        (seen.ARRAY_TASK_1, 1, 2, "a1"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_ranks_meet_at_the_address_of_the_node_that_runs_task_0(
    environment: Mapping[str, str], rank: int, of: int, node: str
) -> None:
    found = variables(environment)
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_ADDR"]) == (str(rank), str(of), f"10.77.0.{node}")


@pytest.mark.usefixtures("slurm")
def test_steps_and_tasks_of_arrays_that_run_at_once_have_ports_of_their_own() -> None:
    """By the number of the job, which differs by one between two tasks of an array, and of the step."""
    environments = [
        {**seen.STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "MASTER_ADDR": "here"}
        for job in (8, 9, 10, 11)
        for step in range(30)
    ]
    ports = {int(variables(each)["MASTER_PORT"]) for each in environments}
    assert len(ports) == len(environments)
    assert all(20000 <= port < 30000 for port in ports)


def test_a_later_part_of_a_step_that_counts_its_tasks_from_0_has_no_task_0(slurm: Path) -> None:
    """Its layout alone is left where the first part has ended."""
    (slurm / "layouts" / "5.2").unlink()
    assert variables(seen.GROUPS_0_AND_2)["MASTER_ADDR"] == "10.77.0.v2"


def test_an_address_and_a_port_that_are_set_overrule() -> None:
    given = variables({**seen.HETEROGENEOUS_STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "1")


@pytest.mark.parametrize(
    ("environment", "node"),
    [(seen.STEP, "a1"), (seen.HETEROGENEOUS_STEP, "v2"), (seen.GROUPS_0_AND_2, "v2"), (seen.ARRAY_TASK_1, "a1")],
)
def test_a_container_without_the_commands_of_slurm_goes_by_variables(
    environment: Mapping[str, str], node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert variables(environment)["MASTER_ADDR"] == node


@pytest.mark.parametrize("answer", ["#!/bin/sh\necho 'sattach: error: Invalid job id' >&2\nexit 1\n", None])
def test_a_placement_that_slurm_does_not_tell_asks_for_the_address(slurm: Path, answer: str | None) -> None:
    if answer is None:
        (slurm / "sattach").chmod(stat.S_IRUSR)
        answer = "sattach"
    else:
        (slurm / "sattach").write_text(answer)
    with pytest.raises(ConfigError) as caught:
        variables(seen.HOST_FILE)
    assert "SLURM_HOSTFILE or --distribution=arbitrary" in str(caught.value)
    assert str(caught.value).endswith("set MASTER_ADDR to its host")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        seen.ONE_TASK,
        seen.GROUP_1,
        {**seen.OF_PLAIN_JOB, "SLURM_JOB_NODELIST": "a1"},
        {**seen.INTERACTIVE, "SLURM_JOB_NODELIST": "a1"},
        seen.SUBMITTED_FROM_STEP,
    ],
    ids=[
        "no launch",
        "one rank",
        "one task",
        "one task of a heterogeneous job",
        "a batch script on its only node",
        "an interactive step on its only node",
        "a batch script that a step has submitted",
    ],
)
def test_one_process_describes_its_host(environment: dict[str, str]) -> None:
    assert launch_variables(environment, command="hetero discover") is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            seen.SALLOC,
            "this is a shell of Slurm job 23, which has 2 nodes; start it on every node: srun --ntasks=2 "
            "--ntasks-per-node=1 hetero discover",
        ),
        ({**seen.SALLOC, "SLURM_JOB_NODELIST": "a1"}, "this is a shell of Slurm job 23, which has 1 node; start it on"),
        (seen.INTERACTIVE, "this is a shell of Slurm job 12, which has 2 nodes; start it on every node: srun "),
        (seen.OF_PLAIN_JOB, "this is the batch script of Slurm job 8, which has 3 nodes; start it on"),
        (
            seen.OF_HETEROGENEOUS_JOB,
            "this is the batch script of Slurm job 5, which has 3 nodes; start it on every node: srun "
            "--het-group=0-2 --ntasks-per-node=1 hetero discover",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT; start"),
        (TORCHRUN | {"RANK": "first"}, "RANK is 'first', must be a whole number"),
        (
            {name: value for name, value in seen.STEP.items() if "NODELIST" not in name},
            "Slurm does not name the nodes of this step (SLURM_STEP_NODELIST); set MASTER_ADDR to the host of task 0",
        ),
    ],
    ids=[
        "salloc",
        "salloc of one node",
        "interactive step",
        "sbatch",
        "sbatch of a heterogeneous job",
        "half of torchrun",
        "no number",
        "no node list",
    ],
)
def test_no_rank_of_a_launch(environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as caught:
        launch_variables(environment, command="hetero discover")
    assert str(caught.value).startswith(message)


def test_a_task_takes_resources_of_its_step_again_to_start_others() -> None:
    job = job_of(seen.ONE_TASK)
    assert job is not None
    assert srun_line(job, "hetero discover") == "srun --overlap --ntasks=3 --ntasks-per-node=1 hetero discover"


def test_the_rank_on_a_node() -> None:
    assert local_rank(TORCHRUN) == 3
    assert local_rank(seen.SEVERAL_TASKS) == 1
    assert local_rank({}) == local_rank(seen.OF_PLAIN_JOB) == 0
