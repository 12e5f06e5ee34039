"""What follows gathers on their communicator starts behind them, where a thread launches them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.runtime.weight_gather import WeightGather

LIMIT_S = 30.0


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("with_host", [True, False], ids=["with a host", "without a host"])
def test_a_collective_starts_behind_gathers_that_a_thread_launches(with_host: bool) -> None:
    """Also where the thread still waits for the host; else ranks would launch in different orders."""
    gather = object.__new__(WeightGather)
    launcher = ThreadPoolExecutor(1) if with_host else None
    gather._launcher = launcher
    host_is_done, started = threading.Event(), threading.Event()
    happened: list[str] = []

    def launch_gather() -> None:
        assert host_is_done.wait(LIMIT_S)
        happened.append("gather")

    def start() -> Done:
        happened.append("collective")
        started.set()
        return Done()

    if launcher is not None:
        launcher.submit(launch_gather)
    collective = gather.behind(start)
    assert started.is_set() is not with_host
    host_is_done.set()
    collective.wait()
    assert happened == (["gather", "collective"] if with_host else ["collective"])
    if launcher is not None:
        launcher.shutdown()
