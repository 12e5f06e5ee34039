"""``hetero plan`` and ``hetero simulate`` as a user runs them."""

import json
import re
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import validate
from hetero.serialization import load, save
from hetero.spec.model_import import load_model
from hetero.spec.parameters import parameters
from hetero.units import GIB

CLUSTER = """\
node_types:
  - name: fast
    device: A100-40
    gpus_per_node: 2
    inside_node: {bandwidth_gb_per_s: 200, latency_us: 10}
  - name: slow
    device: V100-16
    gpus_per_node: 2
    inside_node: {bandwidth_gb_per_s: 60, latency_us: 10}
links:
  between_nodes: {bandwidth_gb_per_s: 2, latency_us: 30}
"""

MODEL = (Path(__file__).parents[3] / "scripts/presets/models/opt-350m.yaml").read_text(encoding="utf-8")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "model.yaml").write_text(MODEL.replace("num_layers: 24", "num_layers: 6"), encoding="utf-8")
    return tmp_path


def run(files: Path, *more: str) -> int:
    known = ["--cluster", str(files / "cluster.yaml"), "--model", str(files / "model.yaml")]
    return main(["plan", *known, "--global-batch-size", "16", *more])


def test_plan_writes_a_plan_that_simulate_reads(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_path, trace_path = files / "plan.json", files / "trace.json"
    assert run(files, "--out", str(plan_path)) == 0
    printed = capsys.readouterr().out
    assert "gap" in printed
    assert "planned in" in printed
    plan = load(Plan, plan_path)
    validate(plan)
    assert plan.global_batch_size == 16

    assert main(["simulate", str(plan_path), "--cluster", str(files / "cluster.yaml"), "--trace", str(trace_path)]) == 0
    printed = capsys.readouterr().out
    assert "s per step" in printed
    assert "None" not in printed
    assert json.loads(trace_path.read_text(encoding="utf-8"))["traceEvents"]


def test_a_distributed_optimizer_needs_less_memory(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two data-parallel ranks: each has half of the optimizer state, a quarter of what weights and it take in fp32."""
    model = load_model(files / "model.yaml")
    one = Stage(first_layer=0, end_layer=6, ranks=(0, 1), dp=2, device="A100-40", micro_batch_size=1, in_flight=1)
    plan = Plan(
        model=model,
        seq_length=128,
        global_batch_size=16,
        replicas=(Replica(num_samples=16, stages=(one,)),),
        idle_ranks=(2, 3),
    )
    save(plan, files / "plan.json")
    simulate = ["simulate", str(files / "plan.json"), "--cluster", str(files / "cluster.yaml")]
    used = []
    for more in ([], ["--use-distributed-optimizer"]):
        assert main([*simulate, *more]) == 0
        (found,) = re.findall(r"(\d+\.\d) of\b", capsys.readouterr().out)
        used.append(float(found))
    saved_gib = sum(parameter.numel for parameter in parameters(model)) * 8 / 2 / GIB
    assert used[0] - used[1] == pytest.approx(saved_gib, abs=0.11)


def test_backwards_stay_whole_where_that_is_asked_for(files: Path) -> None:
    """A model that needs both nodes makes a pipeline, of which the last stage's W's can wait."""
    (files / "cluster.yaml").write_text(CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 1"), encoding="utf-8")
    (files / "model.yaml").write_text(MODEL, encoding="utf-8")
    lags = []
    for more in ((), ("--no-split-backward",)):
        assert run(files, "--out", str(files / "plan.json"), *more) == 0
        lags.append([stage.weight_lag for _, _, stage in load(Plan, files / "plan.json").stages()])
    assert lags[0][-1] is not None
    assert lags[1] == [None, None]


def test_compare_shows_every_yardstick(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, "--compare") == 0
    printed = capsys.readouterr().out
    for name in ("this planner", "uniform", "uniform, fast", "whale", "autohet", "harp"):
        assert name in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--objective", "money"], "node type 'fast' has no price_per_hour"),
        (["--precision", "bf16", "--time-limit", "-1"], "time limit is -1"),
        (["--out", "/no/such/folder/plan.json"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(files: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert run(files, *more) == 2
    assert message in capsys.readouterr().err
