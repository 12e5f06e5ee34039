"""An emulated cluster as users meet it: the launch, the measured plan, and plans that race."""

import json
import re
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.progress import WorkProgress
from hetero.serialization import save
from tests.helpers.commands import MODEL, command_line
from tests.helpers.forked_launch import forked
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import profile

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

CLUSTER = """
node_types:
  - {name: fast, device: A100-40, gpus_per_node: 1}
  - {name: slow, device: V100-16, gpus_per_node: 1}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 100}}
"""

FAST_S, SLOW_S = (0.03, 0.06), (0.09, 0.18)
"""Forward and backward of a layer for one sample."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cluster, profiles of its two devices, an uneven plan and an even one."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    save(profile(MODEL, device="A100-40", block_s=FAST_S), tmp_path / "fast.json")
    save(profile(MODEL, device="V100-16", block_s=SLOW_S), tmp_path / "slow.json")
    for name, cut in (("uneven", 3), ("even", 2)):
        stages = (
            stage(layers=(0, cut), ranks=(0,), device="A100-40"),
            stage(layers=(cut, 4), ranks=(1,), device="V100-16"),
        )
        save(plan(MODEL, [replica(*stages, num_samples=3)]), tmp_path / f"{name}.json")
    return tmp_path


def emulated(folder: Path, **changes: str | None) -> list[str]:
    argv = command_line(
        hetero_emulate=str(folder / "cluster.yaml"), distributed_backend=None, global_batch_size="3", **changes
    )
    return [*argv, "--hetero-profile", str(folder / "fast.json"), str(folder / "slow.json")]


@pytest.mark.rotates(every=2, turn=0)
def test_the_launch_script_of_a_cluster_runs_on_one_machine(folder: Path) -> None:
    """With evaluations and saves between the steps, which no step is charged for."""
    argv = emulated(
        folder,
        hetero_plan=str(folder / "uneven.json"),
        hetero_emulate_time_scale="2",
        eval_iters="2",
        eval_interval="1",
        save=str(folder / "out"),
        save_interval="2",
    )
    run = forked(2, argv)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"valid loss", run.stdout)) == 3
    assert [path.name for path in (folder / "out").iterdir()] == ["emulated"]
    assert "EMULATED: times are those of cluster.yaml, a second of which takes 2 s here" in run.stdout
    assert "step 1/3 | loss" in run.stdout
    assert "| warming up |" in run.stdout
    assert len(re.findall(r"emulated step time [\d.]+ ms", run.stdout)) == 2


def test_a_launch_of_other_ranks_than_the_cluster_has(folder: Path) -> None:
    run = forked(1, emulated(folder))
    assert run.returncode != 0
    assert "it describes 2 devices, the launch has 1 ranks; start one process per device" in run.stderr


def test_out_of_memory_names_rank_device_and_what_it_needs(folder: Path) -> None:
    text = CLUSTER.replace("device: V100-16,", "device: V100-16, memory_gib: 1,")
    (folder / "cluster.yaml").write_text(text)
    run = forked(2, emulated(folder, hetero_plan=str(folder / "uneven.json"), hetero_emulate_time_scale="2"))
    assert run.returncode != 0
    said = "hetero: rank 1 (replica 0 stage 1, V100-16): out of memory in the forward of microbatch 0: it needs"
    assert said in run.stderr


@pytest.mark.rotates(every=2, turn=1)
def test_a_plan_is_measured_beside_its_prediction(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(WorkProgress, "show", lambda _, done, text: told.append((done, text)))
    command = ["simulate", str(folder / "uneven.json"), "--cluster", str(folder / "cluster.yaml")]
    command += ["--profile", str(folder / "fast.json"), "--profile", str(folder / "slow.json")]
    command += ["--measure", "--measure-steps", "1", "--time-scale", "2", "--measure-seq-length", "16"]
    assert main([*command, "--trace", str(folder / "trace.json")]) == 0
    said = capfd.readouterr().out
    assert re.search(r"step: predicted [\d.]+ s, executed [\d.]+ s \(emulated\), [+-][\d.]+%", said), said
    trace = json.loads((folder / "trace.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"replica 0, predicted", "replica 0, executed"}
    assert told == [(1, "0 of 1 steps at the emulated pace"), (2, "1 of 1 steps at the emulated pace")]


def test_a_measured_plan_that_does_not_fit_says_so(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER.replace("device: V100-16,", "device: V100-16, memory_gib: 1,"))
    command = ["simulate", str(folder / "uneven.json"), "--cluster", str(folder / "cluster.yaml"), "--measure"]
    command += ["--profile", str(folder / "fast.json"), "--profile", str(folder / "slow.json"), "--time-scale", "2"]
    assert main(command) == 3
    said = "hetero: replica 0 stage 1 does not fit its devices: each V100-16 of ranks 1 needs"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--measure-steps 3", "--time-scale 2", "--measure-seq-length 16"])
def test_flags_of_a_measurement_that_is_not_asked_for(
    folder: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", str(folder / "uneven.json"), "--cluster", str(folder / "cluster.yaml")]
    assert main([*command, *flag.split()]) == 2
    assert f"hetero: {flag} has no effect without --measure" in capsys.readouterr().err


def test_a_device_without_a_profile_is_told_on_all_ranks(folder: Path) -> None:
    """Rank 0 speaks for all, and the others wait until the launcher ends them."""
    (folder / "cluster.yaml").write_text(CLUSTER.replace("V100-16", "H100"))
    (folder / "uneven.json").write_text((folder / "uneven.json").read_text().replace("V100-16", "H100"))
    run = forked(2, emulated(folder, hetero_plan=str(folder / "uneven.json")))
    assert run.returncode == 2
    assert run.stderr.count("hetero: ") == 1
    assert "H100" in run.stderr


@pytest.mark.rotates(every=3, turn=2)
def test_plans_race(folder: Path) -> None:
    flags = emulated(folder, hetero_emulate_time_scale="2")
    plans = [str(folder / "uneven.json"), str(folder / "even.json")]
    command = ["--plans", *plans, "--report", str(folder / "race.html"), *flags]
    done = forked(2, command, script="tools/race_plans.py")
    assert done.returncode == 0, done.stdout + done.stderr
    ratio = re.search(r"│ even .*?([\d.]+)x", done.stdout)
    assert ratio is not None
    assert float(ratio[1]) > 1.2, "two layers on the slow device take longer than one"
    assert "losses of all 3 steps are the same" in done.stdout
    page = (folder / "race.html").read_text()
    assert "The same step as it ran, emulated" in page
