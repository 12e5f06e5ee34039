"""Runs a step of ``srun`` to its end: hands signals on to its ranks, and requeues the job when its time is over."""

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from hetero.errors import ConfigError
from hetero.signal_handlers import signal_handlers
from hetero.slurm.controller import is_running, job_fields, requeue, signal_step, step_started_by
from hetero.slurm.job import SlurmJob

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_POLL_S = 1.0
"""Pause before Slurm is asked again for a step that ``srun`` has not created yet."""

_REQUEUE_S = 60.0
"""Limit of the wait for Slurm to end a requeued job."""


def run_step(
    job: SlurmJob,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    newest_saved: Callable[[], int | None] | None,
) -> int:
    """Run a step until it has ended.

    The first SIGTERM, SIGINT or SIGHUP reaches the ranks as SIGTERM: they finish their training step, save and exit.
    Slurm sends SIGTERM to a batch script two minutes before its time is over (``--signal=B:TERM@120``). The signal goes
    to this step alone, because the shell of ``salloc`` may be a step of the job as well. A second SIGINT ends ``srun``
    at once.

    Args:
        words: the line of ``srun``.
        newest_saved: returns the newest saved training step, ``None`` if there is none. A batch job that runs out of
            time is requeued if this step has changed since the start; otherwise it would restart for ever without
            progress. Leave it out where a restarted job would not load what it has saved.

    Returns:
        The exit code of ``srun``.

    Raises:
        ConfigError: ``srun`` cannot be started.
    """
    # Signal numbers, and None once the step has ended.
    events: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def put_signal(number: int, frame: FrameType | None) -> None:
        del frame
        # A handler may call put while get waits.
        events.put(number)

    first_saved = newest_saved() if newest_saved is not None else None
    received: list[int] = []
    with signal_handlers(_SIGNALS, put_signal):
        step = _start(words, environment)
        threading.Thread(target=_put_end, args=(step, events), daemon=True).start()
        while (number := events.get()) is not None:
            received.append(number)
            if len(received) == 1:
                _signal_ranks(job, step)
            elif number == signal.SIGINT:
                step.terminate()
        if signal.SIGTERM in received and step.returncode != 0 and newest_saved is not None:
            _requeue_if_saved(job, first_saved, newest_saved())
    return step.returncode if step.returncode >= 0 else 128 - step.returncode


def _start(words: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # srun would end the ranks at a Ctrl-C of the terminal, so it gets a process group of its own.
        return subprocess.Popen(words, env=dict(environment), stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started: {error.strerror}; is Slurm's srun on the PATH?") from None


def _put_end(step: "subprocess.Popen[bytes]", events: "queue.SimpleQueue[int | None]") -> None:
    step.wait()
    events.put(None)


def _signal_ranks(job: SlurmJob, step: "subprocess.Popen[bytes]") -> None:
    # The ranks of a job that is cancelled or preempted, which is COMPLETING, have SIGTERM from Slurm.
    while step.poll() is None and is_running(job_fields(job)):
        if (number := step_started_by(job, pid=step.pid, host=socket.gethostname())) is not None:
            signal_step(job, number, "TERM")
            return
        time.sleep(_POLL_S)


def _requeue_if_saved(job: SlurmJob, first_saved: int | None, saved: int | None) -> None:
    """Requeue a batch job that has run out of time, unless ``--no-requeue`` forbids it."""
    fields = job_fields(job)
    if not is_running(fields) or (fields.get("Requeue"), fields.get("BatchFlag")) != ("1", "1"):
        return
    if saved is None or saved == first_saved:
        since = "" if saved is None else f" from step {saved}"
        _print_line(
            f"out of time: job {job.name} does not queue itself again, as nothing was saved since it has started"
            f"{since}; give it more time (--time), and submit it again"
        )
        return
    _print_line(f"out of time: job {job.name} queues itself again, to go on after step {saved}")
    requeue(job)
    # Slurm would take an exit of this process for the end of the job.
    time.sleep(_REQUEUE_S)


def _print_line(line: str) -> None:
    sys.stderr.write(f"hetero: {line}\n")
    sys.stderr.flush()
