"""Ends a run before its last step: at a signal, after a time limit, or after a step that the flags name."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hetero.distributed.helper_processes import STOP_SIGNALS
from hetero.elastic.records import STOP_FOR_GOOD
from hetero.signal_handlers import signal_handlers
from megatron.pretrain.cli.training_config import RunConfig


class Stop:
    """Knows whether this rank wants to stop. Ranks may differ; the step's collective makes it one decision.

    Attributes:
        signalled: a signal asked for the end.
        is_for_good: the signal was :data:`hetero.elastic.records.STOP_FOR_GOOD`: no other epoch follows.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self.signalled = False
        self.is_for_good = False

    @property
    def wanted(self) -> bool:
        """Whether a signal came, or the time is over."""
        minutes = self._config.exit_duration_minutes
        return self.signalled or (minutes is not None and time.monotonic() - self._started_s > minutes * 60)

    def is_last(self, step: int) -> bool:
        """Tell whether the run ends after ``step`` by its flags. A job may go on with a smaller ``--train-iters``."""
        interval = self._config.exit_interval
        return step >= self._config.train_iters or (interval is not None and step % interval == 0)


@contextmanager
def stop_on_signals(stop: Stop, *, announce: bool, has_agent: bool = False) -> Iterator[None]:
    """Let a signal end the run after the step in hand: SIGTERM, what an agent sends, and what would end this process.

    SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are left alone where they are ignored (``nohup``, background jobs, forks of an
    agent) or somebody handles them. However many come, the rank saves and ends: launchers pass on what a supervisor has
    sent to their ranks as well. A handler that raised could do so in a finalizer, which swallows it.

    Args:
        announce: say so at the first signal, and how to end at once.
        has_agent: an agent of elastic training may send :data:`hetero.elastic.records.STOP_FOR_GOOD`.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if announce and not stop.signalled:
            # Not by print, which the signal may have interrupted.
            name = signal.Signals(number).name
            os.write(2, f"hetero: {name}: stopping after this step; SIGQUIT ends at once, unsaved\n".encode())
        stop.signalled = True
        stop.is_for_good = stop.is_for_good or number == STOP_FOR_GOOD

    replaceable = (signal.SIG_DFL, signal.default_int_handler)
    handled = [n for n in STOP_SIGNALS if n == signal.SIGTERM or signal.getsignal(n) in replaceable]
    if has_agent:
        handled.append(STOP_FOR_GOOD)
    with signal_handlers(handled, handle):
        yield
