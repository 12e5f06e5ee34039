"""Typical mistakes of users, and what they are told: the table of docs/troubleshooting.md.

python -m tests.helpers.mistakes          writes the table of docs/troubleshooting.md anew
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
BEGIN, END = "<!-- the table, from the test of the messages -->", "<!-- end of the table -->"

PRESETS = ROOT / "scripts/presets"

LAPTOPS = """\
node_types:
  - {name: laptop, device: cpu, gpus_per_node: 2, count: 2, inside_node: {bandwidth_gb_per_s: 5, latency_us: 10}}
links:
  between_nodes: {bandwidth_gb_per_s: 1, latency_us: 50}
"""

SLOW = ("torch", "ortools", "megatron.core", "matplotlib", "transformers")
"""What takes a second or more to load, and what only work needs."""


NO_FLAGS = ("--clutser", "--sched", "--hiden-size")
"""Misspelt below: there are none of these."""

PLAN = "hetero plan --cluster c.yaml --model m.yaml --global-batch-size 8"
FLAGS = "python pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
FLAGS += " --max-position-embeddings 32 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --train-iters 2"
FLAGS += " --mock-data --tokenizer-type NullTokenizer --vocab-size 61"

_TRAINS = "python pretrain_gpt.py ..."

WORDS = """\
hetero
hetero pla --cluster c.yaml
hetero plan --clutser c.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster c.yaml --model m.yaml
hetero plan --cluster "" --model m.yaml --global-batch-size 8
{PLAN} stray
{PLAN} --global-batch-size eight
{PLAN} --global-batch-size 0
{PLAN} --seq-length 100000
{PLAN} --precision fp17
{PLAN} --time-limit 10min
{PLAN} --time-limit 0
{PLAN} --hidden-dropout 10%
{PLAN} --hidden-dropout 2
{PLAN} --host-memory-gib -1
{PLAN} --objective money
{PLAN} --budget-per-hour -5
{PLAN} --out folder
{PLAN} --out nowhere/plan.json
{PLAN} --report page.txt
{PLAN} --figure timelin=x.svg
{PLAN} --profile m.yaml
{PLAN} --profile absent.json
hetero plan --cluster absent.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster m.yaml --model c.yaml --global-batch-size 8
hetero plan --cluster plan.json --model m.yaml --global-batch-size 8
hetero plan --cluster typo.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster empty.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster binary.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster folder --model m.yaml --global-batch-size 8
hetero plan --cluster units.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster device.yaml --model m.yaml --global-batch-size 8
hetero plan --cluster c.yaml --model heads.yaml --global-batch-size 8
hetero plan --cluster c.yaml --model tokenizer.json --global-batch-size 8
hetero show c.yaml
hetero show cut.json
hetero show absent.json
hetero show plan.json --sched
hetero show newer.json
hetero validate plan.json --cluster m.yaml
hetero validate plan.json --cluster c.yaml
hetero validate layers.json
hetero simulate plan.json
hetero simulate plan.json --cluster one.yaml
hetero simulate plan.json --cluster laptops.yaml --measure-steps 3
hetero simulate plan.json --cluster laptops.yaml --figure comparison=x.svg
hetero launch c.yaml
hetero launch plan.json
hetero launch plan.json --cluster laptops.yaml --hosts a
hetero launch plan.json --cluster laptops.yaml --run --print
hetero launch plan.json --cluster laptops.yaml --master-port 99999
hetero launch plan.json --cluster laptops.yaml --env FOO
hetero launch plan.json --cluster laptops.yaml --sbatch-option partition=x
hetero launch plan.json --cluster laptops.yaml --sbatch x.sbatch --hosts a,b
hetero launch plan.json --cluster laptops.yaml -- --hetero-plan other.json
hetero discover --out cluster.json
hetero discover --out c.yaml
hetero doctor --link-seconds 5s
hetero devices --cluster m.yaml
hetero profile run --model c.yaml --out profiles
hetero profile run --model m.yaml --out profiles --tp 3
hetero profile run --model m.yaml --out c.yaml
hetero profile run --model m.yaml --out profiles --device tpu
hetero profile host --seconds 0
hetero profile import folder --out profiles
hetero sweep
hetero sweep quik
hetero sweep plan.json
hetero sweep quick --jobs 0
hetero sweep quick --compare folder
hetero elastic agnt
hetero elastic status --etcd nonsense
hetero elastic run --nodes 0 -- pretrain_gpt.py --hetero-cluster c.yaml
hetero elastic run --nodes 2 -- absent.py --hetero-cluster c.yaml
hetero elastic report folder --out x.txt
python pretrain_gpt.py --num-layers 4
{FLAGS} --num-layers four
{FLAGS} --hiden-size 64
{FLAGS} --num-attention-heads 5
{FLAGS} --seq-length 64
{FLAGS} --lr -1
{FLAGS} --tensor-model-parallel-size 2 --hetero-plan plan.json
{FLAGS} --tokenizer-type HuggingFaceTokenizer
{FLAGS} --bf16 --fp16
python tools/preprocess_data.py --input folder --output-prefix out --tokenizer-type ByteTokenizer
python tools/preprocess_data.py --input absent.parquet --output-prefix out --tokenizer-type ByteLevelTokenizer
python tools/preprocess_data.py --input empty.yaml --output-prefix out --tokenizer-type HuggingFaceTokenizer
python tools/convert_checkpoint.py --from hf --to huggingface --input folder --output out
python tools/convert_checkpoint.py --from hetero --to hf --input absent --output out
python tools/convert_checkpoint.py --from hf --to hetero --input folder --output out --tokenizer-model tokenizer.json
python tools/verify_plan.py --verify-steps 0
python tools/verify_plan.py --verify-precision fp17
python tools/race_plans.py --report race.html
python tools/plan_flags.py --num-layers four
"""


def lines() -> list[str]:
    """The wrong command lines, in the order of the page; ``{PLAN}`` and ``{FLAGS}`` stand for what is right in them."""
    return [line for line in WORDS.split("\n") if line]


def write_files(folder: Path) -> None:
    """Write the files that the command lines name."""
    cluster = (PRESETS / "clusters/quickstart.yaml").read_text()
    model = (PRESETS / "models/gpt-200m.yaml").read_text()
    plan = (PRESETS / "plans/quickstart.json").read_text()
    data = json.loads(plan)
    data["replicas"][0]["stages"][0]["end_layer"] += 1
    texts = {
        "c.yaml": cluster,
        "m.yaml": model,
        "plan.json": plan,
        "laptops.yaml": LAPTOPS,
        "one.yaml": LAPTOPS.replace("count: 2", "count: 1"),
        "typo.yaml": LAPTOPS.replace("gpus_per_node", "gpu_per_node"),
        "units.yaml": LAPTOPS.replace("latency_us: 50", "latency_us: 50 miles"),
        "device.yaml": LAPTOPS.replace("cpu", "A100-41"),
        "heads.yaml": model.replace("num_attention_heads: 16", "num_attention_heads: 15"),
        "tokenizer.json": '{"version": "1.0", "added_tokens": [], "model": {}}',
        "layers.json": json.dumps(data),
        "newer.json": json.dumps({"format_version": 99, **{k: v for k, v in data.items() if k != "format_version"}}),
        "cut.json": plan[:200],
        "empty.yaml": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\x80\x04\x95\x00")
    (folder / "folder").mkdir()


def said(line: str) -> tuple[int, str, str]:
    """Give the exit code, stdout and stderr of a command line, run in this process and this folder."""
    program, *words = shlex.split(line.format(PLAN=PLAN, FLAGS=FLAGS))
    module = "hetero.cli"
    if program == "python":
        module, words = words[0].removesuffix(".py").replace("/", "."), words[1:]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(module).main(words)
    return code, out.getvalue(), err.getvalue()


def run_all() -> dict[str, Any]:
    """Run every command line in this process, in a folder of its own.

    Returns:
        ``answers``: by command line, its exit code, stdout and stderr. ``loaded``: what of :data:`SLOW` all of them
        together have loaded. ``written``: files that were not there before.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_files(Path(folder))
        before = set(Path(folder).iterdir())
        answers = {}
        for line in lines():
            code, out, err = said(line)
            answers[line] = [code, out, err.replace(os.path.realpath(folder), "/job")]
        written = sorted(path.name for path in {*Path(folder).iterdir()} - before)
    return {"answers": answers, "loaded": [name for name in SLOW if name in sys.modules], "written": written}


def answers_of_a_fresh_process() -> dict[str, Any]:
    """:func:`run_all` in a process that has loaded nothing yet."""
    command = [sys.executable, "-m", "tests.helpers.mistakes", "--run"]
    given = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    environment = {**given, "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(answers: dict[str, list[Any]]) -> str:
    """A line per message, in the order of the commands."""
    rows = [
        (" ".join(f"`{part}`" for part in err.strip().split("\n")), line.format(PLAN="hetero plan ...", FLAGS=_TRAINS))
        for line, (_, _, err) in answers.items()
    ]
    cells = [(message.replace("|", "\\|"), f"`{line}`") for message, line in rows]
    return "\n".join(["| message | said of |", "|---|---|", *(f"| {message} | {line} |" for message, line in cells)])


def written() -> str:
    """What the page has of it."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return rest.partition(END)[0].strip()


def main() -> None:
    if sys.argv[1:] == ["--run"]:
        json.dump(run_all(), sys.stdout)
        return
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made = table(answers_of_a_fresh_process()["answers"])
    PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
