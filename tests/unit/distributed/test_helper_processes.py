"""Helper processes end with the one that started them."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from hetero.distributed.helper_processes import end_with_parent, leave_ctrl_c_to_parent

FORK = multiprocessing.get_context("fork")


def start_helper_and_wait(begin: str, answer: Connection) -> None:
    helper = FORK.Process(target=helper_main, args=(begin, os.getpid(), answer))
    helper.start()
    time.sleep(60)


def helper_main(begin: str, parent: int, answer: Connection) -> None:
    # A shell starts what runs in the background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    {"alone": end_with_parent, "with ctrl-c": leave_ctrl_c_to_parent}[begin](parent)
    answer.send((os.getpid(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN))
    time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["alone", "with ctrl-c"])
def test_a_helper_ends_with_a_parent_that_is_killed(begin: str) -> None:
    receive, send = FORK.Pipe(duplex=False)
    parent = FORK.Process(target=start_helper_and_wait, args=(begin, send))
    parent.start()
    process_id, ignores_ctrl_c = receive.recv()
    helper = psutil.Process(process_id)
    parent.kill()
    parent.join(timeout=10)
    helper.wait(timeout=5)
    assert ignores_ctrl_c == (begin == "with ctrl-c")


def test_a_helper_whose_parent_has_gone_already_ends_at_once() -> None:
    helper = FORK.Process(target=end_with_parent, args=(1 << 22,))
    helper.start()
    helper.join(timeout=10)
    assert helper.exitcode == -signal.SIGKILL
