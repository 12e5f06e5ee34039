"""``hetero sweep`` as a user runs it: the commands of its page, a killed one, emulation, batch scripts and Slurm."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hetero.cli import main
from hetero.plan.ir import Plan
from hetero.report.sweep_rows import SweepResult
from hetero.serialization import load
from tests.unit.sweep.small import CLUSTER, Planning, write_small

ROOT = Path(__file__).parents[2]

LAUNCH = """\
launch:
  flags: --mock-data --tokenizer-type NullTokenizer --train-iters 2 --lr 1e-4
  sbatch_options: [account=me]
"""


@pytest.mark.slow
@pytest.mark.rotates(every=6, turn=1)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """In the order of the page, with the file that it shows."""
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(# mine\.yaml\n.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(shown, encoding="utf-8")
    commands = [line.split("  #")[0].strip() for line in re.findall(r"^(?:hetero|python) .*$", page, re.MULTILINE)]
    assert len(commands) >= 5
    for command in commands:
        program, *words = shlex.split(command)
        program_words = ["-m", "hetero"] if program == "hetero" else [str(ROOT / words.pop(0))]
        done = subprocess.run(
            [sys.executable, *program_words, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, command + done.stderr
    assert (tmp_path / "sweep-quick/sweep.html").exists()
    assert len(load(SweepResult, tmp_path / "sweep-mine/sweep.json").rows) == 2


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_a_killed_sweep_leaves_nobody_and_goes_on(tmp_path: Path) -> None:
    text = "settings: {time_limit_s: 1, uniform_limit_s: 1}\ngrids:\n"
    text += "  - {clusters: [./four.yaml], models: [./six-layers.yaml], global_batch_sizes: [2, 4, 6, 8, 10, 12]}\n"
    sweep, out = write_small(tmp_path, text), tmp_path / "out"
    command = [sys.executable, "-m", "hetero", "sweep", str(sweep), "--out", str(out), "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers: list[psutil.Process] = []
    while process.poll() is None and len(list((out / "rows").glob("*.json"))) < 2:
        workers = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    stored = {path.stem: path.stat().st_mtime_ns for path in (out / "rows").glob("*.json")}
    assert 2 <= len(stored) < 6
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "[6/6] " in done.stderr
    assert done.stderr.count(" s per step") == 6 - len(stored)
    assert {key: (out / f"rows/{key}.json").stat().st_mtime_ns for key in stored} == stored


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_plans_are_emulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Planning(monkeypatch)
    text = "settings: {time_limit_s: 1}\nemulation: {steps: 1, most_ranks: 2}\ngrids:\n"
    text += "  - {clusters: [./two.yaml, ./four.yaml], models: [./six-layers.yaml], global_batch_sizes: [4]}\n"
    sweep, out = write_small(tmp_path, text), tmp_path / "out"
    one = CLUSTER.replace("gpus_per_node: 2", "gpus_per_node: 1")
    (tmp_path / "two.yaml").write_text(one, encoding="utf-8")
    assert main(["sweep", str(sweep), "--out", str(out), "--jobs", "1", "--mode", "emulate"]) == 0
    small, large = load(SweepResult, out / "sweep.json").rows
    assert small.emulation_error is not None, small.why_not_emulated
    assert large.emulation_error is None
    assert large.why_not_emulated == "not emulated: 4 ranks, emulation.most_ranks is 2"
    monkeypatch.setattr("hetero.commands.sweep_plans.emulated_run", lambda _: pytest.fail("it was emulated again"))
    assert main(["sweep", str(sweep), "--out", str(out), "--jobs", "1", "--mode", "emulate"]) == 0


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_plans_become_jobs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``sbatch`` is a script that notes what it was given, and says a number as the real one does."""
    Planning(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sweep, out = write_small(tmp_path), tmp_path / "out"
    command = ["sweep", str(sweep), "--out", str(out), "--jobs", "1"]
    assert main([*command, "--mode", "scripts"]) == 2
    assert "--mode scripts needs the key 'launch'" in capsys.readouterr().err
    sweep.write_text(sweep.read_text() + LAUNCH.replace(" --lr 1e-4", ""))
    assert main([*command, "--mode", "scripts"]) == 2
    assert "launch.flags: required and missing after --: --lr" in capsys.readouterr().err
    assert not out.exists()

    sweep.write_text(sweep.read_text().replace("--train-iters 2", "--train-iters 2 --lr 1e-4"))
    assert main([*command, "--mode", "scripts"]) == 0
    rows = load(SweepResult, out / "sweep.json").rows
    for row in rows:
        script = Path(row.job).read_text(encoding="utf-8")
        assert "#SBATCH --account=me" in script
        assert f"{out}/plans/{row.key}.json" in script
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    monkeypatch.setenv("PATH", str(sbatch.parent))
    assert main([*command, "--mode", "submit"]) == 2
    assert "needs Slurm's sbatch" in capsys.readouterr().err

    sbatch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/submitted\necho "4$(wc -l < {tmp_path}/submitted);here"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    for _ in range(2):
        assert main([*command, "--mode", "submit"]) == 0
        assert [row.job for row in load(SweepResult, out / "sweep.json").rows] == ["job 41", "job 42"]
    assert (tmp_path / "submitted").read_text().splitlines() == [f"--parsable {row.job}" for row in rows]


@pytest.mark.slow
def test_rows_are_printed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planning = Planning(monkeypatch)
    sweep, first, second = write_small(tmp_path), tmp_path / "first", tmp_path / "second"
    assert main(["sweep", str(sweep), "--out", str(first), "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert "[2/2] four, six-layers, batch 8, fp32: " in err
    assert "2 of 2 combinations have a plan" in out
    sweep.write_text(sweep.read_text().replace("[4, 8]", "[8, 12]"))
    assert main(["sweep", str(sweep), "--out", str(second), "--jobs", "1", "--compare", str(first), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["global_batch_size"] for row in json.loads(out)["rows"]] == [8, 12]
    assert re.search(r"new +four, six-layers, batch 12", err)
    assert re.search(r"gone +four, six-layers, batch 4,", err)
    assert planning.batches == [4, 8, 8, 12]
    (plan, _) = sorted((second / "plans").iterdir())
    assert load(Plan, plan).provenance is not None
    assert main(["sweep", str(sweep), "--compare", str(tmp_path)]) == 2
    assert f"--compare {tmp_path}: it has no sweep.json" in capsys.readouterr().err
    assert main(["sweep"]) == 2
    assert "give a sweep file" in capsys.readouterr().err
