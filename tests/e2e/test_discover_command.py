"""``hetero discover`` as a user types it on this machine, alone and as the tasks of a step of Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero.cli import main
from hetero.discovery.cluster_yaml import cluster_yaml
from hetero.discovery.describe import describe
from hetero.discovery.facts import nodes_of
from hetero.discovery.links import CPU_GB_PER_S
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.helpers.forked_launch import forked
from tests.helpers.ports import free_ports
from tests.unit.discovery.samples import EIGHT_A100, FOUR_V100, gpu_node

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of a host without GPUs")

ROOT = Path(__file__).parents[2]
DISCOVERY = "hetero/discovery/__main__.py"


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_this_host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once written, the file is not written over by accident."""
    out = tmp_path / "cluster.yaml"
    assert main(["discover", "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert "Not found out" in said
    assert f"hetero plan --cluster {out} --model MODEL.yaml" in said
    cluster = load(ClusterSpec, out)
    (node_type,) = cluster.node_types
    assert (node_type.device, node_type.count, cluster.num_devices) == ("cpu", 1, 1)
    assert node_type.host is not None
    assert node_type.host.memory_gib > 0.1
    assert main(["devices", "--cluster", str(out)]) == 0
    assert "host of cpu: hetero discover, 2" in capfd.readouterr().out
    before = out.read_text()
    assert main(["discover", "--out", str(out)]) == 2
    assert f"{out}: it is there already; --force writes over it" in capfd.readouterr().err
    assert main(["discover", "--out", str(tmp_path / "cluster.json")]) == 2
    assert "must end in .yaml or .yml" in capfd.readouterr().err
    assert main(["discover", "--out", "-"]) == 0
    printed = capfd.readouterr()
    assert printed.out == before
    assert "Not found out" in printed.err


def test_the_shell_of_an_allocation_is_no_node(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    assert main(["discover", "--out", str(tmp_path / "c.yaml")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("hetero: this is a shell of Slurm job 7, which has 2 nodes; start it on every node: srun ")


def test_ranks_of_one_host_are_its_devices(tmp_path: Path) -> None:
    out = tmp_path / "cluster.yaml"
    run = forked(3, ["--out", str(out)], script=DISCOVERY)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Not found out") == 1, "rank 0 alone prints"
    (node_type,) = load(ClusterSpec, out).node_types
    assert (node_type.gpus_per_node, node_type.count) == (3, 1)
    assert node_type.inside_node is not None
    assert node_type.inside_node.bandwidth_gb_per_s == CPU_GB_PER_S
    alone = "--rdzv-backend hetero-static --rdzv-endpoint localhost:0"
    # In a comment of several lines.
    words = " ".join(out.read_text().replace("#", " ").split())
    assert f"torchrun {alone} --nproc-per-node 3 -m hetero doctor" in words
    again = forked(2, ["--out", str(out)], script=DISCOVERY)
    assert again.returncode == 2
    assert again.stderr.count("hetero: ") == 1, "rank 0 alone says what is wrong"


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_tasks_of_a_step_on_unequal_nodes(tmp_path: Path) -> None:
    """Each is bound to a core, and one of them shares its own with a third: 0.5, 0.5 and 1 core, or all alike."""
    cores = sorted(os.sched_getaffinity(0))
    bound = [cores[0], cores[0], cores[-1]]
    (port,) = free_ports(1)
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_NODELIST": "node[0-2]",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "hetero", "discover", "--out", str(tmp_path / "cluster.yaml")],
            env=os.environ | step | {"SLURM_PROCID": str(task), "SLURMD_NODENAME": f"node{task}"},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
        )
        for task, core in enumerate(bound)
    ]
    said = [task.communicate(timeout=90) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0], said
    text = (tmp_path / "cluster.yaml").read_text()
    if len(cores) > 1:
        types = load(ClusterSpec, tmp_path / "cluster.yaml").node_types
        assert [(each.device, each.count) for each in types] == [("cpu-0.5-cores", 2), ("cpu-1-core", 1)]
    assert re.search(r"nodes: \[node0, node1", text)
    assert "between_nodes: {bandwidth_gb_per_s: " in text
    assert "no task described" not in text


@pytest.mark.slow
def test_what_is_written_is_planned_for_as_it_is(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = nodes_of([gpu_node("a", *EIGHT_A100), gpu_node("v", *FOUR_V100)])
    out, model = tmp_path / "cluster.yaml", ROOT / "scripts/presets/models/gpt-200m.yaml"
    out.write_text(cluster_yaml(describe(nodes, date="2026-11-23"), heading="Found."))
    words = ["--cluster", str(out), "--model", str(model), "--global-batch-size", "16", "--time-limit", "2"]
    assert main(["plan", *words]) == 0
    assert "A100-40" in capfd.readouterr().out
