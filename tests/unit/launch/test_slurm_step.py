"""The line of srun that a launch runs in an allocation, and what its tasks become."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.launch.slurm_nodes import place_nodes
from hetero.launch.slurm_step import step_words
from hetero.launch.torchrun import TorchrunOptions
from hetero.slurm.job import SlurmJob, job_of
from hetero.slurm.step_environment import environment_for_srun
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.host import HostProfile
from tests.helpers.sources import ROOT
from tests.unit.launch.test_slurm_nodes import GPUS, node

OPTIONS = TorchrunOptions(flags=("--hetero-plan", "my plan.json"), address="", port=0)
PLAIN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1,v[1-2]", "SLURM_PROCID": "0", "SLURMD_NODENAME": "a1"}
HETEROGENEOUS = PLAIN | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "v[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "a1",
}
EACH = ["--ntasks-per-node=1", "--cpu-bind=none", "--mem=0"]


def job(environment: dict[str, str]) -> SlurmJob:
    found = job_of(environment)
    assert found is not None
    return found


def parts(words: list[str]) -> list[list[str]]:
    """What srun is asked for in each part of the step, without the task, which is the same in all."""
    found, tasks = [[]], set()
    at = iter(words)
    for word in at:
        if word == sys.executable:
            task = [word]
            for following in at:
                if following == ":":
                    found.append([])
                    break
                task.append(following)
            tasks.add(tuple(task))
        else:
            found[-1].append(word)
    assert len(tasks) == 1
    return found


def test_a_plain_job_is_one_part_that_asks_for_all_of_its_gpus() -> None:
    nodes = place_nodes(GPUS, [node("a1", a100=2), node("v1", v100=4), node("v2", v100=4)])
    words = step_words(job(PLAIN), nodes, OPTIONS, cluster=GPUS)
    assert parts(words) == [
        ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--nodes=3", "--ntasks=3", *EACH, "--gpus=10"]
    ]
    task = words[words.index("-m") :]
    assert task[:3] == ["-m", "hetero.launch.slurm_task", "--rendezvous"]
    host, _, port = task[3].partition(":")
    assert host == "a1.address"
    assert 15_000 <= int(port) < 30_000
    assert task[4:] == [
        *("--logs", "launch-logs", "--node", "a1=0:2", "--node", "v1=1:4", "--node", "v2=2:4"),
        *("--", "torchrun", "pretrain_gpt.py", "--hetero-plan", "my plan.json"),
    ]


def test_a_heterogeneous_job_has_a_part_for_each_component_in_the_order_of_the_job() -> None:
    nodes = place_nodes(GPUS, [node("v1", v100=4), node("v2", v100=4), node("a1", 1, a100=2)])
    words = step_words(job(HETEROGENEOUS), nodes, OPTIONS, cluster=GPUS)
    start = ["srun", "--export=ALL", "--kill-on-bad-exit=1", "--het-group=0"]
    assert parts(words) == [
        [*start, "--nodes=2", "--ntasks=2", *EACH, "--gpus=8"],
        ["--het-group=1", "--nodes=1", "--ntasks=1", *EACH, "--gpus=2"],
    ]
    assert "a1=0:2" in words, "its node rank is that of the plan"


def test_ranks_of_a_mixed_node_see_the_cards_of_the_plan() -> None:
    """Seen: Slurm refuses ``--gpus=a100:2,v100:8`` for three nodes, and any type in a job that asked for none."""
    mixed = node("m1", v100=4, a100=2, indices={"v100": (0, 1, 4, 5), "a100": (2, 3)})
    nodes = place_nodes(GPUS, [mixed, node("v1", v100=4), node("v2", v100=4)])
    words = step_words(job(PLAIN), nodes, OPTIONS, cluster=GPUS)
    assert parts(words)[0][-1] == "--gpus=14"
    assert [words[i + 1] for i, word in enumerate(words) if word == "--node"] == ["m1=0:2::2,3", "v1=1:4", "v2=2:4"]
    # The job need not have all GPUs of the node.
    some = dataclasses.replace(mixed, gpu_indices={"v100": (4, 5), "a100": (2, 3)})
    assert place_nodes(GPUS, [some, *[each.allocated for each in nodes[1:]]])[0].visible_gpus == (0, 1)


def test_a_step_inside_of_a_step_shares_what_that_holds() -> None:
    """``srun --pty bash``, and a launch there."""
    step = PLAIN | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a1", "SLURM_STEP_NUM_TASKS": "1"}
    one = ClusterSpec(node_types=(dataclasses.replace(GPUS.node_types[0], gpus_per_node=1),))
    nodes = place_nodes(one, [node("a1", a100=2)])
    for environment, overlaps in ((PLAIN, False), (step, True)):
        assert ("--overlap" in step_words(job(environment), nodes, OPTIONS, cluster=one)) is overlaps
    given = dataclasses.replace(OPTIONS, address="fe80::1", port=7)
    for options, endpoint in ((OPTIONS, "127.0.0.1:"), (given, "[fe80::1]:7")):
        words = step_words(job(PLAIN), nodes, options, cluster=one)
        assert words[words.index("--rendezvous") + 1].startswith(endpoint)


def test_srun_gets_no_options_of_the_job_from_its_environment() -> None:
    """Seen: ``SLURM_GPUS`` with typed GPUs, ``SLURM_MEM_...`` of one component for all, ``SLURM_EXPORT_ENV=NONE``.

    Those of a component as well: with ``SLURM_GPUS_PER_NODE_HET_GROUP_1=v100:2`` srun refuses ``--gpus=2`` in its part.
    """
    options = ("GPUS", "GPUS_PER_NODE", "MEM_PER_NODE", "EXPORT_ENV", "HOSTFILE", "DISTRIBUTION", "CPUS_PER_TASK")
    of_components = [f"{name}_{kind}_GROUP_{i}" for name in options for kind in ("HET", "PACK") for i in (0, 12)]
    given = HETEROGENEOUS | {f"SLURM_{name}": "x" for name in (*options, *of_components)} | {"PATH": "/bin"}
    assert environment_for_srun(given) == HETEROGENEOUS | {"PATH": "/bin"}
    # A job that was submitted from inside of a heterogeneous one has its variables.
    other = {name: text for name, text in environment_for_srun(given | {"SLURM_JOB_ID": "9"}).items() if "SIZE" in name}
    assert other == {}


@pytest.mark.parametrize(
    ("node_type", "binding", "expected"),
    [
        ({}, None, ""),
        ({"host": 2}, None, ":node-if-possible"),
        ({"host": 1}, None, ""),
        ({"host": 2}, "socket", ":socket"),
        ({"host": 2, "device": "cpu"}, None, ""),
    ],
)
def test_ranks_are_bound_where_the_cluster_file_knows_processors(
    node_type: dict[str, object], binding: str | None, expected: str
) -> None:
    numa = node_type.get("host")
    host = HostProfile(source="a test", memory_gib=500, numa_nodes=numa) if isinstance(numa, int) else None
    device = str(node_type.get("device", "A100-40"))
    cluster = ClusterSpec(node_types=(NodeType(name="box", device=device, gpus_per_node=2, host=host),))
    options = dataclasses.replace(OPTIONS, numa_binding=binding)
    words = step_words(job(PLAIN), place_nodes(cluster, [node("b1", a100=2)]), options, cluster=cluster)
    assert words[words.index("--node") + 1] == f"b1=0:2{expected}"


@pytest.mark.parametrize("numactl", [True, False])
@pytest.mark.parametrize(("binding", "bound"), [("", ""), ("socket", "socket"), ("node-if-possible", "node")])
def test_a_task_becomes_the_torchrun_of_its_node(tmp_path: Path, binding: str, bound: str, numactl: bool) -> None:
    """It finds itself by the name of its node, whatever its number is; who asks for a binding gets it, or an error."""
    (tmp_path / "torchrun").write_text(f"#!{sys.executable}\nimport json, sys; print(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "torchrun").chmod(0o755)
    if numactl:
        (tmp_path / "numactl").touch(mode=0o755)
    done = run_task(tmp_path, "b1", "--node", f"b1=1:4{binding and ':'}{binding}")
    falls_back = binding == "node-if-possible" and not numactl
    said = "hetero: b1: ranks are not bound to the processors near their GPU: no numactl\n"
    assert (done.returncode, done.stderr) == (0, said if falls_back else "")
    assert json.loads(done.stdout) == [
        *("--nnodes", "2", "--nproc-per-node", "4"),
        *(["--numa-binding", bound] if bound and not falls_back else []),
        *("--rdzv-backend", "hetero-static", "--rdzv-endpoint", "h:1", "--rdzv-conf", "node_rank=1"),
        *("--log-dir", "logs/7/b1", "--tee", "3", "it's.py", "--split", "9, 1"),
    ]


@pytest.mark.parametrize(
    ("visible", "sees"),
    [("", ("4,5,6,7", "")), (":node:1,3", ("5,7", "PCI_BUS_ID")), ("::7", ("4,5,6,7", ""))],
)
def test_a_task_shows_its_ranks_the_cards_of_the_plan(tmp_path: Path, visible: str, sees: tuple[str, str]) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$CUDA_DEVICE_ORDER"\n')
    (tmp_path / "torchrun").chmod(0o755)
    done = run_task(tmp_path, "b1", "--node", f"b1=1:2{visible}", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert (done.returncode, done.stdout.rstrip("\n").split(" ")) == (0, list(sees))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other", "hetero: a task of this launch is node other, which is none of its nodes (a1, b1); 'hetero launch"),
        ("b1", "hetero: torchrun cannot be started on this node: No such file or directory; give its path: --torchrun"),
    ],
)
def test_a_task_that_cannot_start_says_why(tmp_path: Path, name: str, said: str) -> None:
    done = run_task(tmp_path, name, "--node", "b1=1:4")
    assert done.returncode == 2
    assert done.stderr.startswith(said)


def run_task(folder: Path, name: str, *nodes: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hetero.launch.slurm_task", "--rendezvous", "h:1", "--logs", "logs"]
    command += ["--node", "a1=0:2", *nodes, "--", "torchrun", "it's.py", "--split", "9, 1"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": name, "PATH": str(folder), "PYTHONPATH": str(ROOT)}
    environment |= variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
