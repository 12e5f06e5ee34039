"""Runs a step of ``srun`` to its end: tells its ranks when the time is over, and queues the job again."""

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from hetero.errors import ConfigError
from hetero.slurm.controller import requeue, signal_step, state_of, step_started_by
from hetero.slurm.job import SlurmJob

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_ASK_AGAIN_S = 1.0
"""For a step that ``srun`` has not started yet."""

_UNTIL_ENDED_S = 60.0
"""For Slurm to end a job that it has queued again."""


def run_step(
    job: SlurmJob,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    newest_saved: Callable[[], int | None] | None,
) -> int:
    """Run a step until it has ended.

    The first SIGTERM (which Slurm sends to a batch script when its time is almost over, ``--signal=B:TERM@120``),
    SIGINT or SIGHUP is handed on to the ranks as SIGTERM: they finish the step in hand, save and leave. It goes to this
    step of the job alone; the shell of ``salloc`` may be a step as well. A second SIGINT ends the step at once. Of a
    job that is being cancelled or preempted Slurm has told the ranks itself.

    Args:
        words: the line of ``srun``.
        newest_saved: the newest step that is saved, ``None`` if there is none; not given where a job that starts again
            would not go on from what it has saved. After the end of its time a batch job is queued again if this has
            changed since the start, as it would otherwise run for ever without getting on.

    Returns:
        The exit code of ``srun``.

    Raises:
        ConfigError: ``srun`` cannot be started.
    """
    # Numbers of signals, and None for the end of the step.
    events: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    before = newest_saved() if newest_saved is not None else None
    with _signals_into(events):
        step = _started(words, environment)
        threading.Thread(target=_note_end, args=(step, events), daemon=True).start()
        told: list[int] = []
        while (event := events.get()) is not None:
            told.append(event)
            if told == [event]:
                _tell_ranks(job, step)
            elif event == signal.SIGINT:
                step.terminate()
        code = step.returncode
        if signal.SIGTERM in told and code != 0 and newest_saved is not None:
            _queue_again(job, before, newest_saved())
    return code if code >= 0 else 128 - code


def _started(words: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # A process group of its own: a Ctrl-C of the terminal is for this process, and would make srun end the ranks.
        return subprocess.Popen(words, env=dict(environment), stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        raise ConfigError(f"{words[0]} cannot be started: {error.strerror}; is Slurm's srun on the PATH?") from None


def _note_end(step: "subprocess.Popen[bytes]", events: "queue.SimpleQueue[int | None]") -> None:
    step.wait()
    events.put(None)


def _tell_ranks(job: SlurmJob, step: "subprocess.Popen[bytes]") -> None:
    # Cancelled or preempted, the job is COMPLETING, and Slurm has told the ranks.
    while step.poll() is None and state_of(job).get("JobState") == "RUNNING":
        if (number := step_started_by(job, pid=step.pid, host=socket.gethostname())) is not None:
            signal_step(job, number, "TERM")
            return
        time.sleep(_ASK_AGAIN_S)


def _queue_again(job: SlurmJob, before: int | None, saved: int | None) -> None:
    """Queue a job again that is out of time, unless it may not (``--no-requeue``), or is no batch job."""
    state = state_of(job)
    if (state.get("JobState"), state.get("Requeue"), state.get("BatchFlag")) != ("RUNNING", "1", "1"):
        return
    if saved is None or saved == before:
        _say(
            f"out of time: job {job.name} does not queue itself again, as nothing was saved since it has started"
            f"{'' if saved is None else f' from step {saved}'}; give it more time (--time), and submit it again"
        )
        return
    _say(f"out of time: job {job.name} queues itself again, to go on after step {saved}")
    requeue(job)
    # The end of this process would be taken for that of the job.
    time.sleep(_UNTIL_ENDED_S)


def _say(line: str) -> None:
    sys.stderr.write(f"hetero: {line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _signals_into(events: "queue.SimpleQueue[int | None]") -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        del frame
        # This queue's put may be called while its get waits.
        events.put(number)

    before = {each: signal.signal(each, note) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
