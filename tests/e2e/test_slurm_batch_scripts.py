"""What batch scripts ask of Slurm, on a real one: nodes of two kinds of GPUs, and one that has both.

No rank computes: a stand-in of torchrun says which GPUs its node has given it.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.sweep.folder import StoredJob
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import put_command
from tests.helpers.waiting import until
from tests.unit.sweep.small import CLUSTER, write_small

pytestmark = [pytest.mark.dist, pytest.mark.slow, needs_slurm, pytest.mark.timeout(120)]

LINK = Link(bandwidth_gb_per_s=1, latency_us=10)
OLD = NodeType(name="old", device="V100-16", gpus_per_node=2, inside_node=LINK)
NEW = NodeType(name="new", device="A100-40", gpus_per_node=2, inside_node=LINK)

FLAGS = ["--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "2"]

TORCHRUN = """#!/bin/bash
echo "SEES $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES: $*"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    kinds = (
        NodeKind(name="ampere", count=2, gpus={"a100": 2}),
        NodeKind(name="mixed", count=1, gpus={"a100": 2, "v100": 2}),
        NodeKind(name="volta", count=2, gpus={"v100": 2}),
    )
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), *kinds) as cluster:
        cluster.environment["PYTHONPATH"] = str(ROOT)
        yield cluster


@pytest.fixture
def mixed_node_first(slurm: SlurmCluster) -> Iterator[None]:
    """Slurm takes nodes of the least weight first, which sites give to those that they would rather use up."""
    others = "NodeName=ampere[0-1],volta[0-1]"
    slurm.call("scontrol", "update", others, "Weight=10")
    yield
    slurm.call("scontrol", "update", others, "Weight=1")


def written_script(slurm: SlurmCluster, folder: Path, *node_types: NodeType, options: tuple[str, ...] = ()) -> Path:
    """The script that ``hetero launch`` writes on the head for a plan with a stage on each node."""
    cluster = ClusterSpec(node_types=node_types, links=Links(between_nodes=LINK))
    nodes = [node_type for node_type in node_types for _ in range(node_type.count)]
    stages = [
        stage(layers=(i, i + 1), ranks=(2 * i, 2 * i + 1), tp=2, device=node.device) for i, node in enumerate(nodes)
    ]
    trained: Plan = plan(llama_model(num_layers=len(nodes)), [replica(*stages, num_samples=4)])
    prediction = PlanPrediction(step_s=1, step_low_s=1, step_high_s=1, bubble_share=0)
    provenance = PlanProvenance(command="a test", cluster=cluster, prediction=prediction)
    save(dataclasses.replace(trained, provenance=provenance), folder / "plan.json")
    put_command(folder, "torchrun", TORCHRUN)
    script = folder / "job.sbatch"
    words = [word for option in options for word in ("--sbatch-option", option)]
    words += ["--torchrun", str(folder / "torchrun"), "--sbatch", str(script), "--", *FLAGS]
    slurm.call(sys.executable, "-m", "hetero", "launch", str(folder / "plan.json"), *words)
    return script


def submit(slurm: SlurmCluster, folder: Path, script: Path) -> int:
    return slurm.submit(script, options=(f"--chdir={folder}",))


def granted_nodes(slurm: SlurmCluster, job: int) -> list[set[str]]:
    """By component, the nodes that Slurm gave a job once it has started; tests have a time limit."""
    lists: list[str] = []

    def has_started() -> bool:
        said = slurm.call("scontrol", "--oneliner", "show", "job", str(job)).splitlines()
        lists[:] = [found[1] for line in said if (found := re.search(r" NodeList=(\w\S*)", line))]
        return len(lists) == len(said)

    until(has_started)
    return [set(slurm.call("scontrol", "show", "hostnames", nodes).split()) for nodes in lists]


def output(folder: Path) -> str:
    """What all jobs that ran in a folder have said."""
    return "".join(path.read_text() for path in folder.glob("hetero-*.out"))


def seen_gpus(folder: Path) -> list[tuple[str, str]]:
    """The node of each task of all jobs that ran in a folder, and its GPUs."""
    return sorted(re.findall(r"SEES (\w+) ([\d,]+)", output(folder)))


def test_a_job_without_options_gets_the_cards_of_its_plan(
    slurm: SlurmCluster, tmp_path: Path, mixed_node_first: None
) -> None:
    """The first GPUs of the mixed node, which Slurm chooses, are others; a request without a type got both pairs."""
    script = written_script(slurm, tmp_path, OLD)
    slurm.wait_for_end(submit(slurm, tmp_path, script))
    assert seen_gpus(tmp_path) == [("mixed0", "2,3")], script.read_text()


def test_components_start_that_would_take_the_nodes_of_one_another(
    slurm: SlurmCluster, tmp_path: Path, mixed_node_first: None
) -> None:
    """In the order of the file, the first one takes the mixed node, which the second one cannot do without."""
    script = written_script(slurm, tmp_path, OLD, dataclasses.replace(NEW, count=3))
    new, old = granted_nodes(slurm, job := submit(slurm, tmp_path, script))
    assert new == {"ampere0", "ampere1", "mixed0"}
    assert old < {"volta0", "volta1"}
    assert "#   new needs 3 of the 3 nodes that could serve it\n#   old needs 1 of the 3 nodes" in script.read_text()
    slurm.wait_for_end(job)
    ranks = dict(re.findall(r"SEES (\w+) .* node_rank=(\d)|SEES", output(tmp_path)))
    by_rank = sorted(ranks, key=ranks.__getitem__)
    assert by_rank[:1] == sorted(old), f"the order of the plan's nodes is that of the cluster file: {output(tmp_path)}"
    assert set(by_rank[1:]) == new
    assert dict(seen_gpus(tmp_path))["mixed0"] == "0,1", "its A100s"


def test_gpus_of_a_whole_job_are_spread_evenly_in_every_task_of_an_array(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Left alone, Slurm gives three of four to the mixed node."""
    options = ("gpus=4", "array=0-1", "nodelist=mixed0,volta0")
    script = written_script(slurm, tmp_path, dataclasses.replace(OLD, count=2), options=options)
    slurm.wait_for_end(submit(slurm, tmp_path, script))
    assert [(node, len(gpus.split(","))) for node, gpus in seen_gpus(tmp_path)] == [("mixed0", 2)] * 2 + [
        ("volta0", 2)
    ] * 2


SWEEP = """\
settings: {{time_limit_s: 1, uniform_limit_s: 1}}
launch:
  flags: {flags}
  sbatch_options: [hold, 'fast:partition=ampere', 'slow:partition=volta', 'old:partition={partition}']
grids:
  - {{clusters: [./four.yaml, ./other.yaml], models: [./six-layers.yaml], global_batch_sizes: [4]}}
"""


@pytest.mark.rotates(every=3, turn=2)
def test_a_sweep_submits_what_is_missing_after_slurm_has_refused_a_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two clusters, each with a node type that the other one does not have."""
    (tmp_path / "other.yaml").write_text(CLUSTER.replace("name: slow", "name: old"), encoding="utf-8")

    def swept(partition: str) -> str:
        path = write_small(tmp_path, SWEEP.format(flags=" ".join(FLAGS), partition=partition))
        words = [sys.executable, "-m", "hetero", "sweep", str(path), "--out", str(tmp_path / "out")]
        said = ["bash", "-c", '"$@" 2>&1; echo "exit code $?"', "bash", *words, "--mode", "submit"]
        return slurm.call(*said, folder=tmp_path)

    def jobs() -> dict[str, str]:
        """By partition, the number of the component's job."""
        lines = slurm.call("squeue", "--noheader", "--format=%P %i").splitlines()
        return dict(line.split() for line in lines)

    said = swept("nowhere")
    assert "other, six-layers, batch 4, fp32: not submitted: sbatch: error: " in said
    assert "exit code 2" in said
    (stored,) = (tmp_path / "out/jobs").glob("*.json")
    first = load(StoredJob, stored).job_id
    assert f"submitted before it: 1 of 2 (job {first}); the same command submits what is missing" in said
    assert jobs() == {"ampere": f"{first}+0", "volta": f"{first}+1"}
    said = swept("mixed")
    assert "exit code 0" in said
    assert len(list((tmp_path / "out/jobs").glob("*.json"))) == 2
    assert jobs().keys() == {"ampere", "volta", "mixed"}
    assert jobs()["volta"] == f"{first}+1"
    slurm.call("scancel", "--user=root")
