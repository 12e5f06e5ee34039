"""What ``scripts/pretrain_*.sh`` start: the command lines, from the scripts themselves, without starting anything."""

import os
import subprocess
import sys
from pathlib import Path

from hetero.spec.model import ModelSpec
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.planning import described_model
from tests.helpers.sources import ROOT

SCRIPTS = {path.stem.removeprefix("pretrain_"): path for path in sorted((ROOT / "scripts").glob("pretrain_*.sh"))}

TEXT = {"DATA_PATH": "corpus_text_document", "TOKENIZER_TYPE": "ByteLevelTokenizer"}

_STAND_IN = f"""#!{sys.executable}
import os, sys
with open(os.environ["COMMANDS"], "a") as file:
    file.write("\\0".join(sys.argv[1:]) + "\\n")
"""


def ran(name: str, folder: Path, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """The script of a model, in ``folder``, with a Python that writes down what it is to run."""
    python = folder / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    (folder / "commands").write_text("")
    given = {"PATH": os.environ["PATH"], "PYTHON": str(python), "COMMANDS": str(folder / "commands"), **variables}
    return subprocess.run(
        ["bash", str(SCRIPTS[name]), *flags], cwd=folder, env=given, capture_output=True, text=True, check=False
    )


def commands(name: str, folder: Path, *flags: str, **variables: str) -> list[list[str]]:
    """The command lines of Python that the script runs, one after the other."""
    done = ran(name, folder, *flags, **variables)
    assert done.returncode == 0, done.stderr
    return [line.split("\0") for line in (folder / "commands").read_text().splitlines()]


def model_of(planning: list[str]) -> ModelSpec:
    """The model of a command line of ``tools/plan_flags.py``."""
    model, _ = described_model(parse_args(planning[1:]))
    return model
