"""``hetero discover`` in every form of an allocation of a real Slurm, whose nodes do not know each other's names.

Nodes are unlike by the processors on which their tasks may run. Nothing sets ``MASTER_ADDR``.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.waiting import until

pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_slurm, pytest.mark.timeout(120)]

# Tasks on small nodes may run on one core, those on large ones on all.
ON_ITS_CORES = f"""#!/usr/bin/env bash
case "${{SLURMD_NODENAME:-}}" in small*) exec taskset --cpu-list {min(os.sched_getaffinity(0))} "$0.any" "$@" ;; esac
exec "$0.any" "$@"
"""

MEETS = (
    "import os; from hetero.launch.launched_by import launch_variables as of; found = of(os.environ, command=''); "
    "print('RANK', os.environ['SLURMD_NODENAME'], *(found[k] for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
)

DISCOVER = "hetero discover --quiet --force --out"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    kinds = NodeKind(name="large", count=2), NodeKind(name="small", count=2)
    settings = {"LaunchParameters": "use_interactive_step"}
    with SlurmCluster(
        tmp_path_factory.mktemp("slurm"), *kinds, names_known="own on loopback", host_name="host-{}", settings=settings
    ) as cluster:
        yield cluster


@pytest.fixture
def variables(slurm: SlurmCluster, tmp_path: Path) -> dict[str, str]:
    """For ``sbatch`` and ``salloc``: how ``hetero`` is found."""
    commands = put_command(tmp_path / "bin", "hetero", ON_ITS_CORES)
    put_command(commands, "hetero.any", HETERO)
    return {
        "PATH": f"{commands}:{slurm.environment['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MEETS": MEETS,
        "PYTHON": sys.executable,
    }


def ran(
    slurm: SlurmCluster,
    folder: Path,
    variables: dict[str, str],
    *lines: str,
    components: Sequence[str],
    options: str = "",
) -> str:
    """The output of a batch script of ``lines``, each component of whose job has the nodes of a list."""
    script = folder / "job.sbatch"
    asked = [f"#SBATCH --nodes={len(each.split(','))} --ntasks-per-node=1 --nodelist={each}" for each in components]
    script.write_text("\n".join(["#!/bin/bash", "\n#SBATCH hetjob\n".join(asked), *lines, ""]))
    given = (f"--chdir={folder}", f"--output={folder}/out-%j", *options.split())
    job = slurm.submit(script, options=given, **variables)
    slurm.wait_for_end(job)
    return (folder / f"out-{job}").read_text()


def found(path: Path) -> dict[tuple[str, ...], str]:
    """By the nodes of a type, its device."""
    return {each.nodes: each.device for each in load(ClusterSpec, path).node_types}


@pytest.mark.parametrize(
    "components", [("small1", "large0"), ("large0", "small1")], ids=["sorted last", "sorted first"]
)
def test_a_heterogeneous_job_in_either_order(
    slurm: SlurmCluster, tmp_path: Path, variables: dict[str, str], components: tuple[str, str]
) -> None:
    """Types are in the order of the components; a part of the job is described as what it is."""
    said = ran(
        slurm,
        tmp_path,
        variables,
        f"srun --het-group=0-1 --ntasks-per-node=1 {DISCOVER} both.yaml",
        f"srun --het-group=1 --ntasks-per-node=1 {DISCOVER} second.yaml",
        components=components,
    )
    assert "warning" not in said, "the store listens on the address of one node, not on all"
    both = found(tmp_path / "both.yaml")
    assert list(both) == [(node,) for node in components], said
    assert len(set(both.values())) == 2, "the nodes are unlike"
    assert found(tmp_path / "second.yaml") == {(components[1],): "cpu"}
    assert f"The job has 2 nodes; no task described {components[0]}. Find out: srun" in " ".join(
        (tmp_path / "second.yaml").read_text().replace("#", "").split()
    )


def test_one_plain_allocation_of_unlike_nodes(slurm: SlurmCluster, tmp_path: Path, variables: dict[str, str]) -> None:
    """Also in parts of one step, of which task 0 is on the node that is sorted last; and by two steps at once."""
    said = ran(
        slurm,
        tmp_path,
        variables,
        "hetero discover",
        f"srun --ntasks=1 --nodes=1 --nodelist=small0 {DISCOVER} parts.yaml : --ntasks=2 --nodes=2 "
        f"--nodelist=large0,large1 {DISCOVER} parts.yaml",
        *(
            f"srun --overlap --ntasks=2 --nodes=2 --nodelist=large0,{other} {DISCOVER} {other}.yaml &"
            for other in ("small0", "large1")
        ),
        "wait",
        components=["large0,large1,small0"],
    )
    number = re.search(r"Slurm job (\d+), which has 3 nodes", said)
    assert number is not None, said
    assert f"job {number[1]}, which has 3 nodes; start it on every node: srun --ntasks=3 --ntasks-per-node=1 " in said
    assert list(found(tmp_path / "parts.yaml")) == [("small0",), ("large0", "large1")], said
    assert list(found(tmp_path / "small0.yaml")) == [("large0",), ("small0",)], said
    assert list(found(tmp_path / "large1.yaml")) == [("large0", "large1")], said


def test_all_ranks_know_where_task_0_runs(slurm: SlurmCluster, tmp_path: Path, variables: dict[str, str]) -> None:
    """In steps of a heterogeneous job, on a host file, with several tasks per node, and in all tasks of an array."""
    (tmp_path / "hosts").write_text("small0\nlarge0\n")
    meets = '"$PYTHON" -c "$MEETS"'
    heterogeneous = ran(
        slurm,
        tmp_path,
        variables,
        "echo STEP",
        f"srun --het-group=0,2 {meets}",
        "echo STEP",
        f"srun --het-group=1-2 --ntasks-per-node=2 --ntasks=2 --overcommit {meets}",
        components=["small0", "large1", "large0"],
    )
    array = ran(
        slurm,
        tmp_path,
        variables,
        "echo STEP",
        f"srun {meets}",
        "echo STEP",
        f"SLURM_HOSTFILE={tmp_path}/hosts srun --distribution=arbitrary {meets}",
        components=["large0,small0"],
        options="--array=0-1 --open-mode=append",
    )
    outputs = sorted(path.read_text() for path in tmp_path.glob("out-*"))
    assert len(outputs) == 3, "each task of the array has an output of its own"
    outputs.remove(heterogeneous)
    assert array in outputs
    for said, tasks in [(heterogeneous, [2, 4]), *((text, [2, 2]) for text in outputs)]:
        steps = [re.findall(r"RANK (\w+) (\d+) (\d+) (\S+)", step) for step in said.split("STEP\n")[1:]]
        assert [len(step) for step in steps] == tasks, said
        for step in steps:
            (first,) = [node for node, rank, _, _ in step if rank == "0"]
            assert {address for *_, address in step} == {slurm.hosts.addresses[first]}, said
            assert {int(of) for _, _, of, _ in step} == {len(step)}


def test_the_shell_of_salloc_is_no_task(slurm: SlurmCluster, tmp_path: Path, variables: dict[str, str]) -> None:
    """Where it is a step on the first node (``use_interactive_step``); the line that is said does it."""
    bash = shutil.which("bash")
    with slurm.terminal(
        "salloc", "--nodes=2", "--nodelist=large0,small0", folder=tmp_path, SHELL=str(bash), **variables
    ) as terminal:
        terminal.type(f"cd {tmp_path}; hetero discover\n")
        until(lambda: terminal.has_ended() or "start it on every node: srun --ntasks=2" in terminal.said)
        (line,) = re.findall(r"start it on every node: (srun .* hetero discover)\b", terminal.said)
        terminal.type(f"{line} --quiet --force --out cluster.yaml; exit\n")
        terminal.wait()
    assert list(found(tmp_path / "cluster.yaml")) == [("large0",), ("small0",)], terminal.said


STARTED = """#!/bin/bash
# In the place of a script that trains: task 1 loses its node in its first run.
echo "RUN $RUN CLUSTER $CLUSTER CHECKPOINT $CHECKPOINT ARGUMENTS $*"
cp "$CLUSTER" "$RUN/cluster.${SLURM_RESTART_COUNT:-0}.yaml"
if [ "$SLURM_ARRAY_TASK_ID" = 1 ] && [ -z "${SLURM_RESTART_COUNT:-}" ]; then
    scontrol update NodeName="$SLURMD_NODENAME" State=DRAIN Reason=test
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_1"
    sleep 60
fi
"""


def test_each_task_of_an_array_describes_its_nodes_whenever_it_starts(
    slurm: SlurmCluster, tmp_path: Path, variables: dict[str, str]
) -> None:
    """``discover_and_pretrain.sbatch``: folders of their own, and after a requeue on another node its cluster file."""
    (tmp_path / "train.sh").write_text(STARTED)
    given = {"RUN": str(tmp_path / "run"), "CHECKPOINT": str(tmp_path / "out"), **variables}
    options = (f"--chdir={tmp_path}", f"--output={tmp_path}/out-%a", "--array=0-1", "--nodes=1", "--ntasks-per-node=2")
    script = ROOT / "scripts" / "slurm" / "discover_and_pretrain.sbatch"
    job = slurm.submit(script, "train.sh", "--lr", "1", options=options, **given)
    until(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", f"{job}_1"))
    slurm.requeue(f"{job}_1")
    slurm.wait_for_end(job)
    said = "".join((tmp_path / f"out-{task}").read_text() for task in (0, 1))
    for task in (0, 1):
        run = tmp_path / "run" / f"task-{task}"
        assert f"RUN {run} CLUSTER {run}/cluster.yaml CHECKPOINT {tmp_path}/out/task-{task} ARGUMENTS --lr 1\n" in said
    # One task of the two that were asked for describes the node.
    runs = [load(ClusterSpec, tmp_path / "run" / "task-1" / f"cluster.{n}.yaml").node_types for n in (0, 1)]
    assert [(each.count, each.gpus_per_node) for (each,) in runs] == [(1, 1), (1, 1)], said
    (lost,), (other,) = (each.nodes for (each,) in runs)
    slurm.resume(lost)
    assert lost != other, said
