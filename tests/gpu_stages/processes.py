"""Runs a program with a time limit, and ends every process that it started.

Processes are found by a mark in their environment, which they inherit. So those are found, too, that have a session
of their own or whose parent has ended, and no process of anybody else.
"""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "MEGATRON_HETERO_GPU_STAGE"
"""Environment variable that holds the mark."""

LEAVE_WITHIN_S = 5.0
"""For the processes of a program that has ended by itself: fork servers notice the end of their parent and leave."""

GONE_WITHIN_S = 10.0
"""Until killed processes are given up; one that waits in the driver may outlive its signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program ended.

    exit_code: ``None`` if it was killed at its limit; negative for another signal.
    num_left: processes that it had left running and that were killed.
    """

    exit_code: int | None
    seconds: float
    num_left: int


def new_mark() -> str:
    """Return a mark that no other run has."""
    return uuid.uuid4().hex


def run_limited(
    command: Sequence[str], *, limit_s: float, mark: str, environment: Mapping[str, str], out: Path, errors: Path
) -> Ended:
    """Run ``command`` for at most ``limit_s`` seconds, then kill what is left of its processes.

    Args:
        mark: of this program alone.
        out: file for standard output; ``errors`` is that for standard error. Both grow while the program runs.
    """
    begin = time.monotonic()
    with out.open("wb") as out_file, errors.open("wb") as errors_file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out_file, stderr=errors_file, env={**environment, MARK: mark}
        )
        try:
            exit_code: int | None = process.wait(timeout=limit_s)
            _wait_until_gone(mark, LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            num_left = kill_marked(mark)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GONE_WITHIN_S)
    return Ended(exit_code=exit_code, seconds=time.monotonic() - begin, num_left=num_left)


def _wait_until_gone(mark: str, seconds: float) -> None:
    """Return as soon as no process has ``mark``, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while next(marked_processes(mark), None) is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_marked(mark: str) -> int:
    """Kill all processes with ``mark`` and return their number; wait until they are gone."""
    killed: set[int] = set()
    deadline = time.monotonic() + GONE_WITHIN_S
    while pids := set(marked_processes(mark)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return len(killed)


def marked_processes(mark: str) -> Iterator[int]:
    """Yield the process ids whose environment has ``mark``. One that has ended but was not waited for has none."""
    words = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                environment = (folder / "environ").read_bytes()
            except OSError:  # it has ended, or is another user's
                continue
            if words in environment.split(b"\0"):
                yield int(folder.name)
