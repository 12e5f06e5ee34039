"""Ends a run before its last step: at a signal, after a time limit, or after a step that the flags name."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron.training.cli.training_config import RunConfig


class Stop:
    """Knows whether this rank wants to stop. Ranks may differ; the step's collective makes it one decision."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self.signalled = False

    @property
    def wanted(self) -> bool:
        """Whether a signal came, or the time is over."""
        minutes = self._config.exit_duration_minutes
        return self.signalled or (minutes is not None and time.monotonic() - self._started_s > minutes * 60)

    def is_last(self, step: int) -> bool:
        """Tell whether the run ends after ``step`` by its flags."""
        interval = self._config.exit_interval
        return step == self._config.train_iters or (interval is not None and step % interval == 0)


@contextmanager
def stop_on_sigterm(stop: Stop) -> Iterator[None]:
    """Let SIGTERM, which Slurm sends before a job's time is over, end the run after the step in hand."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signalled = True

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
