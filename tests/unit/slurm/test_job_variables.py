"""Who a process is by the variables that Slurm sets: its job, its task, and lists of nodes."""

import os
import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero.slurm.job import SlurmJob, hostnames, job_of
from tests.helpers import slurm_environments as seen


def job(environment: Mapping[str, str]) -> SlurmJob:
    found = job_of(environment)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("environment", "task", "step"),
    [
        (seen.STEP, (1, 3), "0"),
        (seen.HOST_FILE, (1, 3), "1"),
        (seen.PARTS, (2, 3), "2"),
        (seen.SEVERAL_TASKS, (5, 6), "3"),
        (seen.ONE_TASK, (0, 1), "4"),
        (seen.HETEROGENEOUS_STEP, (2, 3), "0"),
        (seen.GROUP_1, (0, 1), "1"),
        (seen.GROUPS_0_AND_2, (1, 2), "2"),
    ],
)
def test_a_task_of_a_step(environment: Mapping[str, str], task: tuple[int, int], step: str) -> None:
    found = job(environment).task
    assert found is not None
    assert ((found.task, found.num_tasks), found.step) == (task, step)


def test_shells_and_batch_scripts_are_no_tasks() -> None:
    for environment in (seen.OF_PLAIN_JOB, seen.OF_HETEROGENEOUS_JOB):
        assert (job(environment).task, job(environment).is_batch_script) == (None, True)
    for environment in (seen.SALLOC, seen.INTERACTIVE):
        assert (job(environment).task, job(environment).is_batch_script) == (None, False)
    assert [job(each).node for each in (seen.SALLOC, seen.INTERACTIVE)] == [None, "a1"]


def test_commands_of_slurm_take_a_name_for_one_task_of_an_array() -> None:
    assert [job(each).name for each in (seen.ARRAY_TASK_0, seen.ARRAY_TASK_1)] == ["25", "24_1"]


@pytest.mark.parametrize(
    "environment",
    [
        seen.SUBMITTED_FROM_STEP,
        seen.SUBMITTED_FROM_INTERACTIVE_STEP,
        seen.SUBMITTED_FROM_HETEROGENEOUS_JOB,
        seen.SUBMITTED_FROM_ARRAY,
    ],
)
def test_variables_of_the_job_that_submitted_this_one_do_not_count(environment: Mapping[str, str]) -> None:
    found = job(environment)
    assert (found.name, found.task, found.is_batch_script, found.node) == ("31", None, True, "m1")
    assert [component.node_list for component in found.components] == ["m1"]


def test_a_task_may_have_a_node_of_its_own_by_another_name() -> None:
    """Users set ``SLURMD_NODENAME`` to split a node. A step that submitted a job may have been on one of its nodes."""
    assert job({**seen.STEP, "SLURMD_NODENAME": "half-of-m1"}).task is not None
    again = job({**seen.SUBMITTED_FROM_STEP, "SLURM_JOB_NODELIST": "m1,v1"})
    assert (again.task, again.is_batch_script) == (None, True)


@pytest.mark.parametrize(
    ("node_list", "hosts"),
    [
        ("gpu01", ["gpu01"]),
        ("gpu01,gpu02", ["gpu01", "gpu02"]),
        ("gpu[01-03,07],fat1", ["gpu01", "gpu02", "gpu03", "gpu07", "fat1"]),
        ("rack[1-2]-ib,x", ["rack1-ib", "rack2-ib", "x"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("n[3,1],m[1-2]", ["n3", "n1", "m1", "m2"]),
        ("n[98-101]", ["n98", "n99", "n100", "n101"]),
        ("", []),
    ],
)
def test_the_hosts_of_a_list(node_list: str, hosts: list[str]) -> None:
    assert hostnames(node_list) == hosts


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs Slurm's commands")
def test_the_hosts_of_a_list_are_those_that_scontrol_shows(tmp_path: Path) -> None:
    """Lists of up to three names with up to two brackets each, which is more than Slurm itself writes."""
    rng = random.Random(36)

    def bracket() -> str:
        width, parts = rng.choice((1, 2, 3)), []
        for _ in range(rng.randint(1, 3)):
            start = rng.randint(0, 90)
            parts.append(rng.choice((f"{start:0{width}}", f"{start:0{width}}-{start + rng.randint(0, 4):0{width}}")))
        return f"[{','.join(parts)}]"

    def name() -> str:
        start = "".join(rng.choice(("n", "gpu-", "r3")) + bracket() for _ in range(rng.randint(0, 2)))
        return start or rng.choice(("login", "fat-7", "gpu-3.cluster"))

    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nNodeName=a CPUs=1\nPartitionName=p Nodes=a\n"
    )
    for _ in range(200):
        node_list = ",".join(name() for _ in range(rng.randint(1, 3)))
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", node_list],
            env=os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert hostnames(node_list) == shown.stdout.split(), node_list
