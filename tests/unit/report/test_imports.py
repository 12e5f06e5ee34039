"""Who loads matplotlib, wandb and tensorboard: those who draw, and those who are asked to; no rank by itself."""

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest

from hetero.cli import COMMANDS


def loaded(*statements: str) -> set[str]:
    """Which of the three a new process has loaded that has run ``statements``."""
    code = f"import sys; {'; '.join(statements)}; print({{'matplotlib', 'wandb', 'tensorboard'}} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    found: set[str] = ast.literal_eval(run.stdout.splitlines()[-1].replace("set()", "[]"))
    return set(found)


AS_A_RANK = (
    "from hetero.runtime import cpu_backend",
    "cpu_backend.install()",
    "import megatron.pretrain.training, hetero.emulation.ranks.setup",
)


WITH_CUDA = ("import torch", "torch.cuda.is_available = lambda: True")


@pytest.mark.slow
@pytest.mark.rotates("processes")
@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(AS_A_RANK, id="ranks", marks=pytest.mark.slow),
        pytest.param((*WITH_CUDA, *AS_A_RANK), id="ranks with CUDA", marks=pytest.mark.slow),
        pytest.param((f"import {', '.join(COMMANDS.values())}",), id="commands"),
    ],
)
def test_ranks_and_the_command_line_start_without_them(statements: Iterable[str]) -> None:
    assert not loaded(*statements)


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_a_rank_that_asks_for_wandb_and_tensorboard_gets_them() -> None:
    pytest.importorskip("wandb")
    asks = "import wandb, wandb.sdk; from torch.utils.tensorboard import SummaryWriter"
    assert loaded(*AS_A_RANK, asks) == {"wandb", "tensorboard"}


@pytest.mark.slow
def test_figures_need_it() -> None:
    assert "matplotlib" in loaded("import hetero.report.figures.canvas")
