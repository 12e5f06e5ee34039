"""The batch scripts of elastic training under a real Slurm: which task is meant, by which address, and queued when."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.waiting import until

pytestmark = [needs_slurm, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPTS = ROOT / "scripts" / "slurm"

STAND_IN = """#!/usr/bin/env bash
# Leaves when it is told to, with the exit code that the file of its task says.
echo "agent $*"
trap 'echo told; sleep 0.2; exit "$(cat "codes/${SLURM_ARRAY_TASK_ID:-plain}")"' TERM
while [ ! -e stop ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Nodes that are not called as their hosts, each of which has its own name at 127.0.1.1, as on Debian."""
    with SlurmCluster(
        tmp_path_factory.mktemp("slurm"), NodeKind(count=5), host_name="host-{}", names_known="own on loopback"
    ) as cluster:
        yield cluster


def submit_agents(slurm: SlurmCluster, folder: Path, *options: str, output: str = "%a.out", **variables: str) -> int:
    """Submit elastic.sbatch with stand-ins for agents; return the number of the job."""
    bin_folder = put_command(folder / "bin", "hetero", STAND_IN)
    (folder / "etcd").mkdir(exist_ok=True)
    (folder / "etcd" / "address").write_text("http://10.0.0.1:1\n")
    return slurm.submit(
        SCRIPTS / "elastic.sbatch",
        *("fast", str(folder / "etcd"), "pretrain_gpt.py"),
        options=(f"--chdir={folder}", f"--output={output}", *options),
        **{"PATH": f"{bin_folder}:{slurm.environment['PATH']}", **variables},
    )


@pytest.fixture(scope="module", autouse=True)
def told_by_time(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, Path]:
    """An array and a plain job that are told at once: two minutes ahead of an end in two minutes.

    Slurm looks every half minute; meanwhile the fifth node has other tests.
    """
    folder = tmp_path_factory.mktemp("timed")
    (folder / "codes").mkdir()
    for task, code in {"0": 0, "1": 75, "2": 1, "plain": 0}.items():
        (folder / "codes" / task).write_text(str(code))
    array = submit_agents(slurm, folder, "--time=2", "--array=0-2")
    return array, submit_agents(slurm, folder, "--time=2", output="plain.out"), folder


def said_address(text: str) -> str:
    return text.partition("--host=")[2].split()[0]


def test_an_agent_is_reached_by_the_address_that_slurm_knows(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The node is in no file of hosts by its name, and the host has its own name at 127.0.1.1."""
    (tmp_path / "stop").touch()
    slurm.wait_for_end(submit_agents(slurm, tmp_path, output="address.out"))
    said = (tmp_path / "address.out").read_text()
    node = said.partition("--node-name=")[2].split()[0]
    assert said_address(said) == slurm.hosts[node].address
    slurm.wait_for_end(submit_agents(slurm, tmp_path, output="given.out", HOST_ADDRESS="10.9.9.9"))
    assert said_address((tmp_path / "given.out").read_text()) == "10.9.9.9"


def test_a_task_out_of_time_before_etcd_has_an_address_says_so(slurm: SlurmCluster, tmp_path: Path) -> None:
    put_command(tmp_path / "bin", "hetero", STAND_IN)
    number = slurm.submit(
        SCRIPTS / "elastic.sbatch",
        *("fast", str(tmp_path / "etcd"), "pretrain_gpt.py"),
        options=(f"--chdir={tmp_path}", "--output=out"),
        PATH=f"{tmp_path / 'bin'}:{slurm.environment['PATH']}",
    )
    out = tmp_path / "out"
    until(lambda: out.exists() and f"waiting for etcd to write {tmp_path}/etcd/address" in out.read_text())
    slurm.call("scancel", "--batch", "--signal=TERM", str(number))
    slurm.wait_for_end(number)
    assert f"SIGTERM, and etcd has not written its address yet: {number} is not queued again" in out.read_text()
    assert "agent" not in out.read_text()


def test_an_agent_leaves_while_slurm_is_still_sending_the_signal(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The job's state is SIGNALING for a moment (22.05.8), as a stand-in for scontrol says all the time."""
    (tmp_path / "codes").mkdir()
    (tmp_path / "codes" / "plain").write_text("75")
    says_so = 'case "$*" in *" show job "*) echo "JobId=1 JobState=SIGNALING Requeue=1"; exit ;; esac'
    put_command(tmp_path / "bin", "scontrol", f'#!/bin/bash\n{says_so}\nexec {shutil.which("scontrol")} "$@"\n')
    number = submit_agents(slurm, tmp_path, output="out")
    until(lambda: "agent elastic" in (tmp_path / "out").read_text() if (tmp_path / "out").exists() else False)
    slurm.call("scancel", "--batch", "--signal=TERM", str(number))
    slurm.wait_for_end(number)
    assert "told\nelastic.sbatch: out of time, and not queued again" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("known", ["name", "127.0.0.1"])
def test_an_address_that_is_a_name_or_loopback(known: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Of a name that is at 127.0.1.1 the host's other address counts; loopback is right where all is on one host."""
    (tmp_path / "stop").touch()
    known_address = "$(hostname)" if known == "name" else known
    put_command(tmp_path / "bin", "scontrol", f'#!/bin/bash\necho "NodeName=$4 NodeAddr={known_address} Gres=(null)"\n')
    slurm.wait_for_end(submit_agents(slurm, tmp_path, output="address.out"))
    said = (tmp_path / "address.out").read_text()
    node = said.partition("--node-name=")[2].split()[0]
    assert said_address(said) == (known if known != "name" else slurm.hosts[node].address)


def test_etcd_publishes_the_address_that_slurm_knows(slurm: SlurmCluster, tmp_path: Path) -> None:
    bin_folder = put_command(tmp_path / "bin", "hetero", HETERO)
    folder, node = tmp_path / "etcd", slurm.nodes[4]
    number = slurm.submit(
        SCRIPTS / "elastic_store.sbatch",
        str(folder),
        options=(f"--chdir={tmp_path}", f"--nodelist={node}", "--output=store.out"),
        PATH=f"{bin_folder}:{slurm.environment['PATH']}",
        PYTHONPATH=str(ROOT),
    )
    until(lambda: (folder / "address").exists() or not slurm.states(number))
    address = slurm.hosts[node].address
    try:
        assert (folder / "address").read_text() == f"https://{address}:2379\n", (tmp_path / "store.out").read_text()
        assert (folder / "certificates" / f"server-{address}.pem").exists()
    finally:
        slurm.call("scancel", str(number))
        slurm.wait_for_end(number)


@pytest.mark.parametrize("script", ["elastic", "elastic_store"])
def test_a_job_without_the_environment_of_its_user_says_so(script: str, slurm: SlurmCluster, tmp_path: Path) -> None:
    number = slurm.submit(
        SCRIPTS / f"{script}.sbatch",
        *("fast", str(tmp_path / "etcd"), "pretrain_gpt.py"),
        options=(f"--chdir={tmp_path}", "--output=none.out", "--nodelist=node4"),
        SBATCH_EXPORT="NONE",
    )
    slurm.wait_for_end(number)
    said = (tmp_path / "none.out").read_text()
    assert "no command hetero on the PATH of this job" in said
    assert "submit with --export=ALL" in said


def test_each_task_out_of_time_is_queued_again_if_something_was_gained(
    slurm: SlurmCluster, told_by_time: tuple[int, int, Path]
) -> None:
    """Task 2 is the one that was split off last: its SLURM_JOB_ID is the number of the array."""
    array, plain, folder = told_by_time
    names = {"0": f"{array}_0", "1": f"{array}_1", "2": f"{array}_2", "plain": str(plain)}

    def states() -> dict[str, str]:
        return slurm.states(array) | slurm.states(plain)

    def said(task: str) -> str:
        path = folder / f"{task}.out"
        return path.read_text() if path.exists() else ""

    try:
        until(lambda: all("agent" in said(task) for task in names))
        until(lambda: not {"RUNNING", "COMPLETING"} & set(states().values()))
        assert states() == {names[task]: "PENDING" for task in ("0", "2", "plain")}
        for task in ("0", "2", "plain"):
            assert said(task).count("told") == 1
            assert f"{names[task] if task == '2' else ''} queues itself again" in said(task)
        assert "not queued again: no step was committed" in said("1")
        assert "--time" in said("1")
    finally:
        slurm.call("scancel", str(array), str(plain))
