"""Typical mistakes of users, and what they are told: the table of docs/troubleshooting.md.

python -m tests.helpers.mistakes          writes the table of docs/troubleshooting.md
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.generated_parts import table_row, write

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
BEGIN = "<!-- the table, from the test of the messages -->"

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

RIGHT = {
    "PLAN": PLAN,
    "FLAGS": FLAGS,
    "PLANNED": FLAGS.replace(" --micro-batch-size 1", ""),
    "DATA": FLAGS.replace(" --mock-data", ""),
}
"""What is right in the command lines, by the name that stands for it there."""

SHOWN = {name: "hetero plan ..." if name == "PLAN" else "python pretrain_gpt.py ..." for name in RIGHT}
"""What the page has in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong command line, and the parts of its one message, as ``mistakes.yaml`` explains them.

    A part that a message cannot have is empty, and ``no_value`` or ``no_limit`` says why.
    """

    line: str
    object: str
    value: str = ""
    found: str = ""
    no_value: str = ""
    limit: str = ""
    no_limit: str = ""
    fix: str = ""

    def parts(self) -> list[str]:
        """What has to stand in the message, each by itself."""
        return [part for part in (self.fix, self.limit, self.found, self.value, self.object) if part]


@cache
def mistakes() -> tuple[Mistake, ...]:
    """All of them, in the order of the page."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  (the one that makes texts alone)
    return tuple(Mistake(**each) for each in content)


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
        "names.yaml": LAPTOPS.replace("laptop", '"laptop\\e[31m"'),
        "heads.yaml": model.replace("num_attention_heads: 16", "num_attention_heads: 15"),
        "tokenizer.json": '{"version": "1.0", "added_tokens": [], "model": {}}',
        "layers.json": json.dumps(data),
        "newer.json": json.dumps({"format_version": 99, **{k: v for k, v in data.items() if k != "format_version"}}),
        "cut.json": plan[:200],
        "empty.yaml": "",
        "vocab.json": '{"a": 0, "b": 1}',
        "merges.txt": "#version: 0.2\na b\n",
        "words.idx": "some words, no numbers",
        "words.bin": "some words",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\x80\x04\x95\x00")
    # Two sequences and a document, of which the file ends early.
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 2, 1)
    (folder / "corpus.idx").write_bytes(header + bytes(4))
    (folder / "corpus.bin").write_bytes(bytes(8))
    (folder / "folder").mkdir()
    (folder / "ours/step_00000007").mkdir(parents=True)
    (folder / "ours/step_00000007/SHA256SUMS").touch()
    (folder / "theirs").mkdir()
    (folder / "theirs/latest_checkpointed_iteration.txt").write_text("7")


def said(line: str) -> tuple[int, str, str]:
    """Give the exit code, stdout and stderr of a command line, run in this process and this folder."""
    program, *words = shlex.split(line.format(**RIGHT))
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
        for line in (each.line for each in mistakes()):
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
        (" ".join(f"`{part}`" for part in err.strip().split("\n")), line.format(**SHOWN))
        for line, (_, _, err) in answers.items()
    ]
    return "\n".join(["| message | said of |", "|---|---|", *(table_row((said, f"`{line}`")) for said, line in rows)])


def main() -> None:
    if sys.argv[1:] == ["--run"]:
        json.dump(run_all(), sys.stdout)
        return
    write(PAGE, {BEGIN: table(answers_of_a_fresh_process()["answers"])})


if __name__ == "__main__":
    main()
