"""``scripts/pretrain_*.sh``: the published sizes, what is missing is told, and each trains at a size for the CPU."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.parameters import parameters
from tests.helpers.forked_launch import forked
from tests.helpers.pretrain_scripts import SCRIPTS, TEXT, commands, model_of, ran
from tests.unit.pretrain.corpora import write_corpus

CLUSTER = str(SCRIPTS["llama2_7b"].parent / "presets/two_cores.yaml")

PUBLISHED = {
    "gpt2_345m": 354_823_168,
    "llama2_7b": 6_738_415_616,
    "llama3_70b": 70_553_706_496,
    "llama3_8b": 8_030_261_248,
    "llama_1b": None,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_8b": 8_190_735_360,
    "gpt3_13b": 13.0e9,
}
"""Parameters: of the weights on huggingface.co, as the hub counts them in the safetensors files of the models that the
scripts name; GPT-3's from table 2.1 of arXiv 2005.14165; ``None`` of a model of nobody's."""


def test_every_script_is_tested() -> None:
    assert set(PUBLISHED) == set(SCRIPTS)


@pytest.mark.parametrize("name", [name for name, number in PUBLISHED.items() if number is not None])
def test_a_model_has_the_published_size(name: str, tmp_path: Path) -> None:
    """Without data: a plan needs none."""
    planning, launching = commands(name, tmp_path, DRY_RUN="1", CLUSTER=CLUSTER)
    model = model_of(planning)
    unpadded = dataclasses.replace(model, padded_vocab_size=model.vocab_size)
    # Of Brown et al.'s three digits one is of a width that is none, see the script.
    tolerance = 0.02 if name == "gpt3_13b" else 0
    assert sum(each.numel for each in parameters(unpadded)) == pytest.approx(PUBLISHED[name], rel=tolerance)
    assert launching[:3] == ["-m", "hetero", "launch"]
    assert "--print" in launching


def test_what_is_set_arrives(tmp_path: Path) -> None:
    """A user's flags are the last ones, and so count."""
    given = {
        "CLUSTER": CLUSTER,
        "DATA_PATH": "0.3 a 0.7 b",
        "TOKENIZER": "tokenizer.json",
        "CHECKPOINT": "out",
        "PRECISION": "fp16",
        "HOSTS": "fast=a,b slow=c",
        "PLANNER": "--hetero-data-sheets",
        "LAUNCH": "--sbatch job.sbatch --sbatch-option account=me",
    }
    planning, launching = commands("llama3_8b", tmp_path, "--lr", "1e-5", **given)
    line = shlex.join(planning)
    assert f"plan_flags.py --hetero-cluster {CLUSTER} --hetero-plan-out runs/llama3_8b/plan.json" in line
    for said in ("--hetero-data-sheets", "--fp16", "--data-path 0.3 a 0.7 b", "--tokenizer-model tokenizer.json"):
        assert f" {said} " in line
    assert line.endswith("--save out --load out --save-interval 500 --hetero-keep-last 3 --async-save --lr 1e-5")
    own = launching.index("--")
    assert shlex.join(launching[:own]).endswith(
        "--hosts fast=a,b slow=c --sbatch job.sbatch --sbatch-option account=me"
    )
    assert planning[-(len(launching) - own - 1) :] == launching[own + 1 :]
    (tmp_path / "mine.json").touch()
    showing, launching = commands("llama3_8b", tmp_path, **given, PLAN="mine.json")
    assert showing == ["-m", "hetero", "show", "mine.json"]
    assert "mine.json" in launching


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "set CLUSTER to a cluster file: 'hetero discover' writes one"),
        ({"CLUSTER": "none.yaml"}, "CLUSTER=none.yaml: no such file"),
        ({"CLUSTER": CLUSTER}, "set DATA_PATH to the prefix of a .bin and .idx file: tools/preprocess_data.py makes"),
        ({"CLUSTER": CLUSTER, "DATA_PATH": "a"}, "set TOKENIZER to the tokenizer that made the data"),
        ({"CLUSTER": CLUSTER, **TEXT, "PRECISION": "fp8"}, "PRECISION=fp8 is none of bf16, fp16 and fp32"),
        ({"CLUSTER": CLUSTER, **TEXT, "PLAN": "a.json"}, "PLAN=a.json: no such file; without PLAN one is made"),
        ({"CLUSTER": CLUSTER, "DRY_RUN": "yes"}, "DRY_RUN=yes is neither 0 nor 1"),
    ],
)
def test_what_is_missing_or_wrong_is_told(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    done = ran("qwen3_8b", tmp_path, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pretrain_qwen3_8b.sh: {said}"), done.stderr
    assert (tmp_path / "commands").read_text() == ""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Python's own sources as bytes, as the scripts make them where nothing else is given."""
    documents = [[*path.read_bytes(), 256] for path in sorted(Path(json.__file__).parent.glob("*.py"))]
    return {**TEXT, "DATA_PATH": write_corpus(tmp_path_factory.mktemp("text") / "json", documents)}


@pytest.mark.rotates("scripts", every=2, turn=0)
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_small_model_of_its_architecture_trains(
    name: str, text: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the script, on forked processes: it plans, launches, and learns."""
    planning, launching = commands(
        name, tmp_path, TINY="1", RUN=str(tmp_path), CHECKPOINT=str(tmp_path / "out"), **text
    )
    script, *argv = planning
    planned = forked(1, argv, script=script)
    assert planned.returncode == 0, planned.stderr
    assert "samples/s" in planned.stdout
    launching[launching.index("--run")] = "--print"
    assert main(launching[2:]) == 0
    said = capsys.readouterr().out
    (line,) = (
        shlex.split(line) for line in said.replace("\\\n", " ").splitlines() if "torchrun --rdzv-backend" in line
    )
    program = next(word for word in line if word.endswith("pretrain_gpt.py"))
    run = forked(load(Plan, tmp_path / "plan.json").world_size, line[line.index(program) + 1 :])
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+/4 \| loss ([\d.]+) ", run.stdout, re.MULTILINE)]
    assert len(losses) == 4
    assert losses[-1] < losses[0], losses
    assert any((tmp_path / "out").iterdir()), "the end of the run is saved"


@pytest.mark.slow
@pytest.mark.rotates(every=6, turn=4)
def test_a_user_tries_the_largest(tmp_path: Path) -> None:
    """As it is typed, with processes and a corpus of its own: experts, four steps on two ranks."""
    environment = {**os.environ, "TINY": "1", "PYTHON": sys.executable, "RUN": str(tmp_path / "run")}
    script = str(SCRIPTS["mixtral_8x7b"])
    done = subprocess.run(["bash", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4 | loss " in done.stdout
