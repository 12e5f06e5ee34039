"""Who loads matplotlib: those who draw, and no rank of a training run."""

import subprocess
import sys
from collections.abc import Iterable

import pytest

from hetero.cli import COMMANDS


def loads_matplotlib(*modules: str) -> bool:
    """Whether a new process that imports ``modules`` has loaded matplotlib."""
    code = f"import sys, {', '.join(modules)}; print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()[-1] == "True"


RANKS = ("megatron.training.training", "hetero.emulation.ranks.setup")


@pytest.mark.parametrize("modules", [RANKS, COMMANDS.values()], ids=["ranks", "commands"])
def test_ranks_and_the_command_line_start_without_matplotlib(modules: Iterable[str]) -> None:
    assert not loads_matplotlib(*modules)


def test_figures_need_it() -> None:
    assert loads_matplotlib("hetero.report.figures.canvas")
