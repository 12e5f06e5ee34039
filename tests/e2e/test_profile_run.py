"""``hetero profile run`` as a user types it: a device that nobody has heard of is measured, and planned for."""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hetero.cli import main
from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.work import parameters_of
from hetero.cost.runtime_model import HETERO
from hetero.data.cost_models import model_costs
from hetero.plan.ir import DEFAULT_DROPOUT
from hetero.profiling.measured_links import COLLECTIVES, MeasuredLinks
from hetero.serialization import load, save, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.model_import import load_model
from hetero.spec.profile import HALVES, LAYER_KINDS, Profile
from tests.helpers.models import gpt2_model
from tests.helpers.sources import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MODEL = gpt2_model(hidden_size=64, kv_channels=16, ffn_hidden_size=256, max_position_embeddings=32)
CLUSTER = """
devices: [{name: abacus}]
node_types:
  - {name: desk, device: abacus, gpus_per_node: 2, memory_gib: 8, inside_node: {bandwidth_gb_per_s: 1, latency_us: 50}}
"""


NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]


def command(folder: Path, *flags: str) -> list[str]:
    model = folder / "tiny.json"
    save(MODEL, model)
    return ["profile", "run", "--model", str(model), "--out", str(folder / "profiles"), *flags]


def costs_on(cluster: ClusterSpec, profile: Path, model: ModelSpec, *, dropout: float) -> CostModel:
    return model_costs(
        model,
        seq_length=model.max_position_embeddings,
        precision="fp32",
        profiles=[profile],
        runtime=HETERO.with_dropout(hidden=dropout, attention=dropout),
        where=cluster,
    )


@pytest.fixture
def page_commands(tmp_path: Path) -> str:
    """Those of docs/profiling.md, with their files in a folder of this test."""
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- runs in CI -->\n```bash\n(.*?)```", page, re.DOTALL)
    return str(block).replace("/tmp", str(tmp_path))


def bash(commands: str) -> str:
    hetero = f'hetero() {{ {sys.executable} -W ignore -m hetero "$@"; }}'
    ran = subprocess.run(
        ["bash", "-c", f"set -e\n{hetero}\n{commands}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.rotates(every=6, turn=5)
def test_a_device_that_nobody_has_heard_of_is_measured_killed_and_planned_for(
    tmp_path: Path, page_commands: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands of the page."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    profile = tmp_path / "profiles" / "tiny.my-laptop.fp32.local.json"
    files, measuring = page_commands.split("hetero profile run")
    bash(files)

    # Killed in the middle of it, as by the end of an allocation.
    flags = shlex.split(measuring.split("\nhetero plan")[0].replace("\\\n", " "))
    alone = [sys.executable, "-m", "hetero.profiling.run", *flags]
    with subprocess.Popen(alone, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("[2/"):
                first.kill()
    before = load(Profile, profile)
    assert before.times[0].kind == before.updates[0].kind == "block"

    # The next one goes on: what is there stays as it is. And the planner takes the file as it is, for such devices.
    said = bash(page_commands)
    assert f"{38 - len(before.times) - len(before.updates)} of 38 points are to be measured" in said
    assert re.search(r"\[1/\d+\] .*: .* ms \(.*% of \d+\).*; about \d+ s to go", said)
    assert re.search(r"predicted: .* s per step", said)
    found = load(Profile, profile)
    assert found.times[: len(before.times)] == before.times
    assert found.updates[: len(before.updates)] == before.updates
    assert len(found.times) > len(before.times)
    assert found.provenance.versions["torch"] == importlib.metadata.version("torch")
    assert found.provenance.hardware.endswith("1 thread")
    assert found.provenance.command.startswith("hetero profile run --model ")

    # It predicts of a layer what was measured of it; but more samples never take less time, so that a larger
    # microbatch that was faster counts for a smaller one.
    model, cluster = load_model(tmp_path / "tiny.yaml"), load(ClusterSpec, tmp_path / "cluster.yaml")
    costs = costs_on(cluster, profile, model, dropout=DEFAULT_DROPOUT)
    for kind in LAYER_KINDS:
        if series := found.times_of(kind, tp=1):
            predicted = costs.layer(kind, device="my-laptop", tp=1, micro_batch_size=series[0].micro_batch_size)
            assert predicted.confidence == Confidence.MEASURED
            assert predicted.forward_s == min(each.forward_s for each in series)
            assert predicted.backward_s == min(each.backward_s for each in series)


@pytest.mark.rotates(every=6, turn=2)
def test_one_rank_of_a_kind_measures_and_all_measure_their_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sort of point of a small model, whose bytes are those of the memory model; the file has the cluster's name
    of the device."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    words = command(tmp_path, "--cluster", str(cluster), "--tp", "1", "--micro-batch-size", "2", *NO_DROPOUT)
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    budgets = ["--budget-seconds", "15", "--link-seconds", "1"]
    ran = subprocess.run([*torchrun, "-m", "hetero", *words, *budgets], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("points are to be measured") == 1
    path = tmp_path / "profiles" / "tiny.abacus.fp32.local.json"
    found = load(Profile, path)
    assert "1 other device of the launch computed meanwhile" in found.provenance.notes
    assert {each.kind for each in found.times} == {*LAYER_KINDS, *HALVES}
    assert {each.recompute for each in found.recomputed} == {"selective", "full"}
    assert len(found.split_backwards) == 1
    assert {each.kind for each in found.updates} == set(LAYER_KINDS)

    # What is measured between the ranks goes into the cluster file as it is.
    links = load(MeasuredLinks, tmp_path / "profiles" / "links.json")
    assert [each.operation for each in links.transfers] == ["send", *COLLECTIVES]
    described = yaml.safe_load(CLUSTER)
    inside = json.loads(to_json(links))["inside_nodes"][0]
    described["node_types"][0] |= {key: inside[key] for key in ("inside_node", "all_reduce_inside_node")}
    cluster.write_text(yaml.safe_dump(described))
    spec = load(ClusterSpec, cluster)
    assert spec.all_reduce_of_devices["abacus"] == links.inside_nodes[0].all_reduce_inside_node

    costs = costs_on(spec, path, MODEL, dropout=0.0)
    microbatch = costs.microbatch(tp=1, micro_batch_size=2)
    for time in found.times:
        counted = costs.saved_bytes(time.kind, microbatch, device="abacus")
        assert time.saved_bytes == pytest.approx(counted, rel=0.05, abs=2048)
        assert time.peak_bytes is not None
        assert time.peak_bytes >= (0 if time.kind == "embedding" else counted)
    for each in found.recomputed:
        counted = costs.saved_bytes("block", microbatch, device="abacus", recompute=each.recompute)
        assert each.saved_bytes == pytest.approx(counted, rel=0.05, abs=2048)
    for memory in found.memory:
        # Positions are part of the embedding, which the cost model leaves out.
        if memory.kind != "embedding":
            assert memory.parameters == pytest.approx(parameters_of(memory.kind, costs.shape, tp=1), rel=0.02)
    attention, mlp = (costs.layer(half, device="abacus", tp=1, micro_batch_size=2) for half in HALVES)
    block = costs.layer("block", device="abacus", tp=1, micro_batch_size=2)
    assert attention.confidence == Confidence.MEASURED
    assert attention.forward_s + mlp.forward_s == pytest.approx(block.forward_s)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget-seconds", "0"], "--budget-seconds is 0, must be above 0"),
        (["--micro-batch-size", "0"], "--micro-batch-size has 0, must be at least 1"),
        (
            ["--out", "pyproject.toml"],
            "--out pyproject.toml: it is a file; name a folder",
        ),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    tmp_path: Path, flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, *flags)) == 2
    assert capfd.readouterr().err.startswith(f"hetero: {message}")
