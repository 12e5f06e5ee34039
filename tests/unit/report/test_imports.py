"""Who loads matplotlib: those who draw, and no rank of a training run."""

import subprocess
import sys

import pytest

from hetero.cli import COMMANDS


def loads_matplotlib(module: str) -> bool:
    """Whether a new process that imports ``module`` has loaded matplotlib."""
    code = f"import sys, {module}; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()[-1] == "True"


@pytest.mark.parametrize("module", ["megatron.training.training", "hetero.emulation.ranks.setup", *COMMANDS.values()])
def test_ranks_and_the_command_line_start_without_matplotlib(module: str) -> None:
    assert not loads_matplotlib(module)


def test_figures_need_it() -> None:
    assert loads_matplotlib("hetero.report.figures.canvas")
