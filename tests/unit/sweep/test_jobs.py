"""Batch scripts of a sweep: options that are for some of its clusters, and what Slurm does not take."""

from pathlib import Path

import pytest

from hetero.cli import main
from hetero.report.sweep_rows import SweepResult
from hetero.serialization import load
from tests.unit.sweep.small import CLUSTER, ROOT, Planning, write_small

SWEEP = """\
settings: {{time_limit_s: 2}}
launch:
  flags: --mock-data --tokenizer-type NullTokenizer --train-iters 2 --lr 1e-4
  sbatch_options: [{options}]
grids:
  - clusters: [./four.yaml, ./other.yaml]
    models: [./six-layers.yaml]
    global_batch_sizes: [4]
"""
"""Over two clusters; of the node types of the second one, one has another name."""

SBATCH = """\
#!/bin/sh
echo "$@" >> {folder}/submitted
if [ -f {folder}/refuses ] && [ "$(wc -l < {folder}/submitted)" = 2 ]; then
    echo "sbatch: error: invalid partition specified: new" >&2
    exit 1
fi
echo "4$(wc -l < {folder}/submitted);here"
"""


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planning:
    """With an ``sbatch`` that numbers jobs from 41, and refuses the second one if there is a file ``refuses``."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH.format(folder=tmp_path))
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Planning(monkeypatch)


def sweep(folder: Path, options: str) -> list[str]:
    path = write_small(folder, SWEEP.format(options=options))
    other = CLUSTER.replace("name: slow", "name: old").replace("bandwidth_gb_per_s: 2,", "bandwidth_gb_per_s: 3,")
    (folder / "other.yaml").write_text(other, encoding="utf-8")
    return ["sweep", str(path), "--out", str(folder / "out"), "--jobs", "1", "--mode"]


def jobs(folder: Path) -> list[str]:
    return [row.job for row in load(SweepResult, folder / "out/sweep.json").rows]


def submitted(folder: Path) -> list[str]:
    return (folder / "submitted").read_text().splitlines() if (folder / "submitted").exists() else []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("slo:partition=a", "slo:partition=a: no cluster of the sweep has a node type 'slo' (did you mean 'slow'?)"),
        ("fast:nodes=2", "cluster four: --sbatch-option fast:nodes=2: nodes follows from the plan; leave it out"),
        ("old:gpus-per-node=1", "cluster other: --sbatch-option old:gpus-per-node=1: GPUs per node are 1, the plan"),
        ("array=0-1", "cluster four: --sbatch-option array=0-1: Slurm has no arrays of heterogeneous jobs"),
    ],
)
@pytest.mark.parametrize("mode", ["scripts", "submit"])
def test_options_are_refused_before_anything_is_planned(
    tmp_path: Path, planning: Planning, capsys: pytest.CaptureFixture[str], mode: str, options: str, said: str
) -> None:
    assert main([*sweep(tmp_path, options), mode]) == 2
    assert f"small.yaml: launch.sbatch_options: {said}" in capsys.readouterr().err
    assert (planning.batches, submitted(tmp_path)) == ([], [])


@pytest.mark.slow
def test_an_option_is_for_the_clusters_that_have_its_node_type(tmp_path: Path, planning: Planning) -> None:
    options = "'fast:partition=new', 'slow:constraint=ib', 'old:partition=old', account=me"
    assert main([*sweep(tmp_path, options), "scripts"]) == 0
    lines = [[line for line in Path(job).read_text().splitlines() if "#SBATCH" in line] for job in jobs(tmp_path)]
    for of_script, own in zip(lines, ("#SBATCH --constraint=ib", "#SBATCH --partition=old"), strict=True):
        assert of_script.count("#SBATCH --account=me") == 2
        found = [line for line in of_script if "constraint" in line or "partition" in line]
        assert found == ["#SBATCH --partition=new", own]


@pytest.mark.slow
def test_all_scripts_are_there_before_the_first_is_submitted(
    tmp_path: Path, planning: Planning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the second script cannot be written, nothing is submitted."""
    command = sweep(tmp_path, "account=me")
    assert main([*command, "scripts"]) == 0
    second = Path(jobs(tmp_path)[1])
    second.unlink()
    second.mkdir()
    assert main([*command, "submit"]) == 2
    assert f"other, six-layers, batch 4, fp32: no batch script: --sbatch {second}" in capsys.readouterr().err
    assert submitted(tmp_path) == []


@pytest.mark.slow
def test_what_was_submitted_is_kept_and_said_where_a_later_job_is_refused(
    tmp_path: Path, planning: Planning, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*sweep(tmp_path, "account=me"), "submit"]
    (tmp_path / "refuses").touch()
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "other, six-layers, batch 4, fp32: not submitted: sbatch: error: invalid partition specified: new" in said
    assert "; submitted before it: 1 of 2 (job 41); the same command submits what is missing" in said
    (tmp_path / "refuses").unlink()
    assert main(command) == 0
    assert jobs(tmp_path) == ["job 41", "job 43"]
    first, second, again = submitted(tmp_path)
    assert first != second == again


@pytest.mark.slow
def test_notes_of_scripts_are_said_once(tmp_path: Path, planning: Planning, capsys: pytest.CaptureFixture[str]) -> None:
    """No Slurm answers here, so that GPUs have no types; both clusters have a node type ``fast``."""
    command = sweep(tmp_path, "'slow:constraint=v100', 'old:constraint=v100'")
    assert main([*command, "scripts"]) == 0
    said = capsys.readouterr().err
    assert said.count("note: the job takes any GPUs for 'fast'") == 1, said
