"""Ranks where a fork could not use CUDA: that no GPU is needed for it, ``torch.cuda`` says that it has begun."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

AGENT = """
import os
import sys

if __name__ == "__mp_main__":
    # The server imports this file too: as a program's import that starts CUDA.
    import torch

    torch.cuda.is_initialized = lambda: True

if __name__ == "__main__":
    from hetero.elastic.fork_server import ForkServer

    server = ForkServer()
    server.start()
    server.warm_up()
    print(server.context.get_start_method(), server.fallback)
    program, output = sys.argv[1:]
    rank = server.start_rank(program=program, flags=("--flag",), variables={"RANK": "3"}, output=output)
    rank.join()
    print(rank.exitcode, os.getpid())
"""

PROGRAM = """
import os
import sys

print(sys.argv[1:], os.environ["RANK"], os.getppid())
sys.exit(7)
"""


@pytest.mark.rotates(every=3, turn=0)
def test_ranks_are_spawned_where_cuda_has_begun_before_them(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path / "program.py"), str(tmp_path / "output")]
    done = subprocess.run(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    how, end = done.stdout.splitlines()
    assert how == "spawn an import has initialised CUDA"
    code, agent = end.split()
    assert code == "7"
    assert (tmp_path / "output").read_text() == f"['--flag'] 3 {agent}\n"
