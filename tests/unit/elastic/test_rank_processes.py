"""What an agent does with the processes of its ranks."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hetero.elastic.fork_server import ForkServer
from hetero.elastic.rank_processes import RankProcesses


@pytest.mark.parametrize("is_for_good", [False, True])
def test_a_stop_passes_over_a_rank_that_has_just_ended(is_for_good: bool) -> None:
    """Its fork server knows of the end, and this process does not yet; the other rank is asked all the same."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with subprocess.Popen(["sleep", "60"]) as lives:
        processes = RankProcesses(ForkServer(), on_end=lambda *_: None, show=lambda _: None)
        processes.running = {
            rank: SimpleNamespace(pid=process.pid, exitcode=None)  # type: ignore[misc]
            for rank, process in enumerate((ended, lives))
        }
        try:
            processes.stop(is_for_good=is_for_good)
            if not is_for_good:
                assert lives.wait(30) == -signal.SIGTERM
        finally:
            lives.kill()
