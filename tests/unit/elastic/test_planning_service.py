"""The processes in which an agent plans."""

import asyncio
import multiprocessing
import os
import threading

import psutil
import pytest

from hetero.elastic.planning_service import PlanningService

pytestmark = pytest.mark.timeout(120)


def test_nothing_of_it_runs_once_it_is_closed() -> None:
    """At the exit of CPython 3.11 a thread that is about to end may close a pipe that is written to."""
    service, before = PlanningService(multiprocessing.get_context("spawn")), set(threading.enumerate())
    process = asyncio.run(service._run(0, os.getpid))
    assert process != os.getpid()
    service.close()
    assert set(threading.enumerate()) <= before
    assert not psutil.pid_exists(process)
