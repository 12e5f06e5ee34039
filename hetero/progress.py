"""Tells how far work has come: in place on a terminal, else as a line now and then."""

import threading
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hetero.console import console as make_console

FIRST_LINE_S = 1.0
"""After which the first line is told where no terminal is. Work that is done by then says nothing."""

NEXT_LINE_S = 10.0
"""Between lines: a log of an hour has 360 of them."""

_REFRESHES_PER_S = 2.0
"""On a terminal. Each takes about a millisecond from whatever this process measures."""


class WorkProgress:
    """Shows on stderr how much of some work is done, how long it has taken and how long it will; a context manager.

    A thread of its own tells it, so that something is said also while the first part of the work is not done yet.

    doing: what is done, as in ``tokenizing``.
    total: of the numbers that :meth:`show` is given, in any unit.
    text: said until :meth:`show` is called.
    """

    def __init__(self, doing: str, *, total: float, text: str = "", console: Console | None = None) -> None:
        self._console = console or make_console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        self._task = self._bar.add_task(doing, total=total, text=text)
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._tell_lines, daemon=True)

    def __enter__(self) -> Self:
        self._bar.reset(self._task)
        if self._console.is_terminal:
            self._bar.start()
        else:
            self._lines.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._bar.stop()
        if self._lines.ident is not None:
            self._lines.join()

    def show(self, done: float, text: str) -> None:
        """Tell that ``done`` of the total is done; ``text`` says what that is, as in ``step 3 of 10``."""
        self._bar.update(self._task, completed=done, text=text)

    def _tell_lines(self) -> None:
        wait_s = FIRST_LINE_S
        while not self._ended.wait(wait_s):
            self._console.print(self._line(), highlight=False, soft_wrap=True)
            wait_s = NEXT_LINE_S

    def _line(self) -> str:
        (task,) = self._bar.tasks
        said = f"{task.description}: {task.fields['text'] or 'begun'}, after {_clock(task.elapsed or 0.0)}"
        left_s = task.time_remaining
        return said if left_s is None else f"{said}, about {_clock(left_s)} left"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, as in ``0:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
