"""The command line: what is printed, what is refused, and with which exit code."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.cli import COMMANDS, main
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Plan
from hetero.plan.lowering import lower
from hetero.schedule.program import parse_programs
from hetero.serialization import save
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage

ROOT = Path(__file__).parents[2]

CLUSTER = """\
node_types:
  - {name: fast, device: A100-40, gpus_per_node: 2}
  - {name: slow, device: V100-16, gpus_per_node: 2}
"""


def small_plan() -> Plan:
    stages = (
        stage(layers=(0, 4), ranks=(0, 1), tp=2, device="A100-40", depth=2),
        stage(layers=(4, 6), ranks=(2,), device="V100-16", depth=1),
    )
    return plan(llama_model(), [replica(*stages, num_samples=3)], idle_ranks=(3,))


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save(small_plan(), path)
    return path


@pytest.fixture
def illegal_plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "illegal.json"
    save(dataclasses.replace(small_plan(), global_batch_size=4), path)
    return path


def test_show_prints_the_table_and_the_picture(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_path)]) == 0
    out = capsys.readouterr().out
    assert "6 layers, sequence 16, global batch 3, fp32, 4 ranks" in out
    assert "replica 0  │ layers 0-3 " in out
    assert "0F0" not in out
    assert out.endswith("\n\ncommunicators: 1 on rank 3, 3 on rank 2, 5 on ranks 0-1 (at most 28)\n")


def test_show_prints_the_schedule_when_asked(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(plan_path), "--schedule"]) == 0
    assert capsys.readouterr().out.endswith("\nreplica 0\n0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n")


def test_show_prints_a_schedule_with_split_backwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = small_plan()
    split = whole.with_replica(0, whole.replicas[0].with_stage(1, wgrad_delay=1))
    save(split, tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--schedule"]) == 0
    assert capsys.readouterr().out.endswith("\n0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2\n")


def interleaved_plan() -> Plan:
    cuts, depths = ((0, 1), (1, 3), (3, 4), (4, 6)), (3, 2, 2, 1)
    turns = (
        stage(layers=held, ranks=(s % 2,), device="A100-40", depth=depth)
        for s, (held, depth) in enumerate(zip(cuts, depths, strict=True))
    )
    alone = replica(stage(layers=(0, 6), ranks=(2,), device="V100-16", depth=1), num_samples=1)
    return sharded(plan(llama_model(), [replica(*turns, num_samples=2), alone]))


def test_show_prints_a_row_per_device_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(interleaved_plan(), tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--schedule"]) == 0
    out = capsys.readouterr().out
    assert "replica 0: stages 0,2 | 1,3 in turns" in out
    assert out.endswith(
        "\nreplica 0\n0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1\n\nreplica 1\n0F0 0B0\n"
    )


def test_show_prints_the_programs_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the form that parses, with the buckets as comments; of a plan that shares nothing, without these."""
    shown = interleaved_plan()
    save(shown, tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--program"]) == 0
    _, _, text = capsys.readouterr().out.partition("\n\n# bucket 0: ")
    buckets = [bucket for bucket in gradient_buckets(shown, bucket_numel=40_000_000) if len(bucket.ranks) > 1]
    assert len(buckets) == 2
    assert text.startswith("ranks 1-2, ")
    assert (
        f"\n# bucket 1: ranks 0,2, {buckets[1].numel:,} gradients from position -1 on\n\nreplica 0, stages 0 2\n"
        in text
    )
    assert parse_programs(f"# {text}") == lower(shown, buckets)

    alone = plan(llama_model(), [replica(stage(layers=(0, 6), ranks=(0,), depth=1), num_samples=1)])
    save(alone, tmp_path / "alone.json")
    assert main(["show", str(tmp_path / "alone.json"), "--program"]) == 0
    assert capsys.readouterr().out.endswith("\n\nreplica 0, stages 0\ncompute  0F0 0B0 UPDATE\n")


def test_validate_says_ok_in_one_line(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(plan_path)]) == 0
    assert capsys.readouterr().out == f"{plan_path}: ok (replicas: 1, stages: 2, ranks: 4, idle: 1)\n"


def test_validate_looks_at_the_cluster_too(plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    assert main(["validate", str(plan_path), "--cluster", str(cluster)]) == 0
    assert f"ok, fits {cluster} (" in capsys.readouterr().out

    cluster.write_text(CLUSTER.replace("V100-16", "T4"))
    assert main(["validate", str(plan_path), "--cluster", str(cluster)]) == 2
    assert "replica 0 stage 1: it wants V100-16, but rank 2 is a T4 on node 1 (slow)" in capsys.readouterr().err


def test_validate_looks_at_the_memory_too(plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3 with the stage, the bytes and the fix."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER.replace("device: V100-16", "device: V100-16, memory_gib: 1"))
    assert main(["validate", str(plan_path), "--cluster", str(cluster)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hetero: replica 0 stage 1 does not fit its devices: each V100-16 of ranks 2 needs ")
    assert "and has 1073741824 bytes (1.00 GiB); most of it, in GiB: context 1.00" in captured.err


def test_validate_says_whose_memory_nobody_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(llama_model(), [replica(stage(layers=(0, 6), ranks=(0,)))])
    save(made, tmp_path / "plan.json")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("node_types: [{name: laptop, device: cpu, gpus_per_node: 1}]")
    assert main(["validate", str(tmp_path / "plan.json"), "--cluster", str(cluster)]) == 0
    assert f"ok, fits {cluster} (memory of cpu unknown) (" in capsys.readouterr().out


def test_show_says_whether_optimizer_state_is_shared(
    tmp_path: Path, plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sharded(small_plan()), tmp_path / "sharded.json")
    assert main(["show", str(tmp_path / "sharded.json")]) == 0
    assert "fp32, 4 ranks, distributed optimizer" in capsys.readouterr().out
    assert main(["show", str(plan_path)]) == 0
    assert "distributed optimizer" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["show", "validate"])
def test_a_mistake_is_one_line_on_stderr(
    command: str, illegal_plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(illegal_plan_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"hetero: {illegal_plan_path}: plan: num_samples of the replicas [3] add up to 3, global_batch_size is 4\n"
    )


@pytest.mark.parametrize("command", ["show", "validate"])
def test_a_missing_file_is_a_mistake_of_the_user(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "absent.json"]) == 2
    assert capsys.readouterr().err.startswith("hetero: absent.json: no such file")


@pytest.mark.parametrize("arguments", [[], ["sho"], ["show"]])
def test_wrong_usage_names_the_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert re.search(r"; see hetero( show)? --help\n$", capsys.readouterr().err)


def test_python_m_hetero(illegal_plan_path: Path) -> None:
    command = [sys.executable, "-m", "hetero", "validate", str(illegal_plan_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "add up to 3" in done.stderr


def test_a_reader_that_leaves_early_is_no_error(plan_path: Path) -> None:
    """As in ``hetero show plan.json | head -1``."""
    command = [sys.executable, "-m", "hetero", "show", str(plan_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_planning_needs_no_torch() -> None:
    assert not {"torch", "megatron"} & loaded_with(*COMMANDS.values())


def test_an_agent_needs_no_planner() -> None:
    assert not {"ortools", "pandas", "hetero.report.content"} & loaded_with("hetero.commands.elastic")


def loaded_with(*modules: str) -> set[str]:
    """What a process has loaded that imported ``modules``."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_listed_and_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert command in capsys.readouterr().out


def test_devices_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    said = capsys.readouterr().out
    (row,) = [line for line in said.splitlines() if line.startswith("│ H100 ")]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("H100", "80", "9.0", "3350", "900", "34", "67", "494.5", "989.5", "989.5", "1979", "with fp8")
    ]
    assert "A100-40, A100-80: NVIDIA A100 data sheet, SXM" in said


HOSTS = """\
node_types:
  - name: fast
    device: A100-40
    gpus_per_node: 4
    host:
      source: its owner
      memory_gib: 512
      updates:
        - {threads: 1, elements_per_s: 2.0e+8}
        - {threads: 16, elements_per_s: 1.6e+9, spread: 0.03}
      memory_copy_gb_per_s: 90
      to_device: {bandwidth_gb_per_s: 24.5, latency_us: 9}
      to_host: {bandwidth_gb_per_s: 26, latency_us: 9}
      gpus_per_switch: 2
      numa_nodes: 2
      processor: some processor
      versions: {torch: 2.13.0}
  - {name: capped, device: V100-16, gpus_per_node: 2, host_memory_gib: 64, host: {source: a guess, memory_gib: 128}}
  - {name: known memory, device: V100-16, gpus_per_node: 2, host_memory_gib: 96}
  - {name: unknown, device: V100-16, gpus_per_node: 2}
"""


def test_hosts_are_listed_with_their_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(HOSTS)
    assert main(["devices", "--cluster", str(cluster)]) == 0
    said = capsys.readouterr().out.partition("Hosts, of one node")[2]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
    nothing = [""] * 4
    assert rows[2:] == [
        ["fast", "512", "2", "1600", "16", "3.0%", "400", "90.0", "24.5", "26.0", "2"],
        ["capped", "64", "1", *nothing, "", "", "", "1"],
        ["known memory", "96", "", *nothing, "", "", "", ""],
    ]
    assert "host of fast: its owner; some processor; torch 2.13.0\nhost of capped: a guess\n" in said


def test_a_cluster_that_says_nothing_of_its_hosts_has_no_table_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    assert main(["devices", "--cluster", str(cluster)]) == 0
    assert "Hosts" not in capsys.readouterr().out


DESCRIBED = """\
devices:
  - name: mine
    memory_gib: 16
    compute_capability: [8, 9]
    data_sheet: {memory_gb_per_s: 448, fp32_tflops: 20, tf32_tflops: 40, bf16_tflops: 80, fp16_tflops: 80,
                 fp8_tflops: 160, source: its vendor}
node_types:
  - {name: box, device: mine, gpus_per_node: 2, inside_node: {bandwidth_gb_per_s: 12, latency_us: 20}}
"""


@pytest.mark.slow
def test_a_device_of_ones_own_goes_from_the_cluster_into_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And from there through every command, without the cluster file where it is not asked for."""
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    cluster.write_text(DESCRIBED)
    assert main(["devices", "--cluster", str(cluster)]) == 0
    assert "mine: its vendor" in capsys.readouterr().out
    model = ROOT / "scripts" / "presets" / "models" / "gpt-200m.yaml"
    asked = [
        "plan",
        "--cluster",
        str(cluster),
        "--model",
        str(model),
        "--global-batch-size",
        "4",
        "--precision",
        "bf16",
    ]
    assert main([*asked, "--fp8", "--data-sheets", "--time-limit", "2", "--out", str(out)]) == 0
    assert "mine fp8" in capsys.readouterr().out
    assert main(["show", str(out)]) == 0
    assert "mine fp8" in capsys.readouterr().out
    for command in (["validate", str(out)], ["validate", str(out), "--cluster", str(cluster)]):
        assert main(command) == 0
    assert main(["simulate", str(out), "--cluster", str(cluster), "--data-sheets"]) == 0
    cluster.write_text(DESCRIBED.replace("bf16_tflops: 80", "bf16_tflops: 90"))
    assert main(["validate", str(out), "--cluster", str(cluster)]) == 2
    assert "it describes device mine with another data_sheet than the cluster does" in capsys.readouterr().err
