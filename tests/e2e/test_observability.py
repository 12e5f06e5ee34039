"""What a run tells beside its losses: stages measured and predicted, memory, traces; and it changes nothing."""

import gzip
import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero.plan.ir import Plan
from hetero.serialization import save
from tests.helpers.commands import MODEL, STEPS, command_line
from tests.helpers.forked_launch import forked
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import profile

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

CLUSTER = """\
node_types:
  - {name: box, device: cpu, gpus_per_node: 1, count: 2, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}
"""


def pipeline() -> Plan:
    stages = [stage(layers=(0, 3), ranks=(0,), device="cpu"), stage(layers=(3, 4), ranks=(1,), device="cpu")]
    return plan(MODEL, [replica(*stages, num_samples=6)])


def numbers_of(cell: str) -> list[float]:
    return [float(each) for each in cell.split("|")]


@pytest.mark.rotates(every=2, turn=0)
def test_a_run_that_is_watched(tmp_path: Path) -> None:
    """Every second step is measured, and both stages are far slower than a profile that is made up. The weights are
    those of a run that nobody watches, bit for bit."""
    save(pipeline(), tmp_path / "plan.json")
    save(profile(MODEL, device="cpu", block_s=(1e-6, 2e-6)), tmp_path / "cpu.json")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    common = {"hetero_plan": str(tmp_path / "plan.json"), "hetero_cluster": str(tmp_path / "cluster.yaml")}
    argv = command_line(
        **common,
        save=str(tmp_path / "watched"),
        hetero_profile=str(tmp_path / "cpu.json"),
        hetero_stage_times_interval="2",
        log_memory_interval="3",
        log_throughput="",
        tensorboard_dir=str(tmp_path / "events"),
        profile="",
        use_pytorch_profiler="",
        profile_step_start="1",
        profile_step_end="2",
        profile_ranks="1",
    )
    run = forked(2, argv)
    assert run.returncode == 0, run.stderr
    plain = forked(2, command_line(**common, save=str(tmp_path / "plain")))
    assert plain.returncode == 0, plain.stderr
    shards = sorted((tmp_path / "plain").rglob("rank_*.safetensors"))
    assert len(shards) == 2
    for shard in shards:
        watched = tmp_path / "watched" / shard.relative_to(tmp_path / "plain")
        assert watched.read_bytes() == shard.read_bytes()
    assert "Seconds of" not in plain.stdout
    assert_table_adds_up(run.stdout)
    assert re.search(r"slow: .* more than 1\.3: replica 0 stage 0 \(cpu, ranks 0\) \d+\.\d\d; replica 0 st", run.stdout)
    measured = "--device-type cpu --tp 1 --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --out profiles"
    assert f"hetero profile run --model MODEL.yaml --seq-length 16 --precision fp32 {measured}" in run.stdout
    replanned = f"hetero plan --cluster {tmp_path}/cluster.yaml ... --profile profiles/model.cpu.fp32.local.json"
    assert replanned in run.stdout
    assert re.search(r"^memory up to step 3, at most: a rank's process \d\.\d\d GiB of its host", run.stdout, re.M)
    assert re.search(r"^step 3/3 .* \| cpu [\d.e-]+ TFLOP/s \| ETA 0:00:00$", run.stdout, re.M)
    assert re.search(r"^seconds: training \d+\.\d", run.stdout, re.M)
    assert f"saved to {tmp_path}/watched/step_" in run.stdout
    trace = tmp_path / "events" / "rank_1_steps_2-2.pt.trace.json.gz"
    assert f"saved to {trace}" in run.stdout
    with gzip.open(trace) as file:
        recorded = json.load(file)["traceEvents"]
    assert any("backward" in each.get("name", "") for each in recorded)
    assert_events(tmp_path / "events")


def assert_table_adds_up(stdout: str) -> None:
    """One table, of step 2: each stage has computed, waited and updated, in no more seconds than the run had."""
    (start,) = [found.start() for found in re.finditer("Seconds of step 2, measured \\| predicted", stdout)]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stdout[start:].splitlines() if "│" in line]
    measured = [[numbers_of(cell)[0] for cell in row[4:]] for row in rows if row[0] == "0"]
    found = re.search(r"^seconds: training (\d+\.\d)", stdout, re.M)
    assert found is not None
    assert len(measured) == 2
    for seconds in measured:
        assert min(seconds) > 0
        assert sum(seconds) < float(found[1]) + 0.05


def assert_events(folder: Path) -> None:
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()["scalars"]
    for source in ("measured", "predicted"):
        for what in ("busy", "bubble", "exposed-sync", "update"):
            for s in (0, 1):
                assert f"stage-{what}-{source}/replica 0 stage {s}" in tags
    assert [event.step for event in events.Scalars("stage-busy-measured/replica 0 stage 0")] == [2]
    assert [event.step for event in events.Scalars("mem-max-host-bytes")] == [STEPS]


def test_a_plan_without_a_cluster_is_measured_alone(tmp_path: Path) -> None:
    save(pipeline(), tmp_path / "plan.json")
    run = forked(2, command_line(hetero_plan=str(tmp_path / "plan.json"), hetero_stage_times_interval="3", profile=""))
    assert run.returncode == 0, run.stderr
    assert "Seconds of step 3, measured\n" in run.stdout
    assert "nothing is predicted: the plan does not say for which cluster it is; give --hetero-cluster" in run.stdout
    assert "slow:" not in run.stdout
    assert "--profile: nsys watches CUDA, this run is on the CPU: nothing is profiled; add --use-" in run.stdout
