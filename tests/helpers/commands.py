"""``pretrain_gpt.py`` on a tiny model: its flags, a plan for them, and a launch under torchrun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.plan.ir import Plan
from hetero.spec.model import ModelSpec
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.cli.model_config import model_spec
from tests.helpers.plans import plan, replica, stage

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 4
"""Ranks of the plan."""

STEPS = 3
_TIMEOUT_S = 150
FLAGS: dict[str, str] = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "61",
    "--make-vocab-size-divisible-by": "64",
    "--global-batch-size": "6",
    "--lr": "1e-2",
    "--train-iters": str(STEPS),
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--num-workers": "0",
    "--log-interval": "1",
    "--distributed-backend": "gloo",
}


def command_line(**changes: str | None) -> list[str]:
    """The flags of the model with some changed: ``hidden_size="64"``, or ``None`` to leave one out."""
    flags = FLAGS | {f"--{name.replace('_', '-')}": value for name, value in changes.items() if value is not None}
    left_out = {f"--{name.replace('_', '-')}" for name, value in changes.items() if value is None}
    words = [word for name, value in flags.items() if name not in left_out for word in (name, value)]
    return ["--mock-data", *(word for word in words if word)]


def model_of(argv: list[str]) -> ModelSpec:
    return model_spec(parse_args(argv).model, tokenizer_vocab_size=61)


MODEL = model_of(command_line(micro_batch_size="1"))


def good_plan(model: ModelSpec = MODEL) -> Plan:
    """tp 2 before one rank, beside a rank with the whole model."""
    first = replica(stage(layers=(0, 3), ranks=(0, 1), tp=2, mbs=2), stage(layers=(3, 4), ranks=(2,)), num_samples=4)
    return plan(model, [first, replica(stage(layers=(0, 4), ranks=(3,)), num_samples=2)])


@dataclass(frozen=True)
class Finished:
    """How torchrun ended, and what it and the ranks printed."""

    returncode: int
    stdout: str
    stderr: str


def launch(num_ranks: int, argv: Sequence[str], *, script: str = "pretrain_gpt.py") -> "subprocess.Popen[str]":
    """Start ``script`` under torchrun, which finds a free port itself."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "200",
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [*torchrun, script, *argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launched(num_ranks: int, argv: Sequence[str], *, script: str = "pretrain_gpt.py") -> Finished:
    """Run ``script`` under torchrun to its end."""
    process = launch(num_ranks, argv, script=script)
    try:
        stdout, stderr = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # Not killed: torchrun has to end its ranks.
        process.terminate()
        stdout, stderr = process.communicate()
        raise AssertionError(f"not done after {_TIMEOUT_S} s\n{stdout}\n{stderr}") from None
    return Finished(process.returncode, stdout, stderr)
