"""Reports on a training run: a log line per interval, TensorBoard scalars, and a progress line on a terminal."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero.emulation.cluster.timing import EmulatedTiming
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.runtime.optimizer import StepResult

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Averages over the steps of an interval and reports them. Only one rank of a launch has one.

    Context manager: leaves the terminal and the files in order.

    Args:
        tensorboard_dir: where to write event files, ``None`` for none.
        progress: show a progress line if the output is a terminal.
        emulated: where a cluster is emulated; times are then emulated ones, and the first step, which only warms up,
            has none.
    """

    def __init__(
        self,
        *,
        train_iters: int,
        global_batch_size: int,
        seq_length: int,
        log_interval: int,
        tensorboard_dir: Path | None,
        progress: bool,
        emulated: EmulatedTiming | None = None,
    ) -> None:
        self._emulated = emulated
        self._warms_up = emulated is not None
        self._train_iters = train_iters
        self._global_batch_size = global_batch_size
        self._seq_length = seq_length
        self._log_interval = log_interval
        self._writer = _summary_writer(tensorboard_dir) if tensorboard_dir is not None else None
        # A wide fixed width keeps one report on one line also where the output is a file.
        console = Console(highlight=False, soft_wrap=True)
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (progress and console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=train_iters, loss="-")
        self._skipped_total = 0
        self._steps = 0
        self._begin_interval()

    @property
    def _time_scale(self) -> float:
        return self._emulated.time_scale if self._emulated is not None else 1.0

    def __enter__(self) -> "Metrics":
        self._progress.start()
        self._begin_interval()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._writer is not None:
            self._writer.close()

    def record(self, step: int, result: StepResult, *, lr: float) -> None:
        """Count step number ``step`` (from 1); report if it ends an interval or the run."""
        self._steps += 1
        if self._warms_up:
            if (scale := self._time_scale) != 1:
                self._console.print(f"an emulated second takes {scale:g} s on this machine")
            self._started, self._steps = time.perf_counter(), 0
        self._skipped_total += result.skipped
        if not result.skipped:
            self._losses.append(result.loss)
        self._progress.update(self._task, completed=step, loss=f"{result.loss:.4f}")
        if step % self._log_interval == 0 or step == self._train_iters or result.stop:
            self._report(step, result, lr)
            self._begin_interval()
        self._warms_up = False

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Leave the time of the block, a save or an evaluation, out of the step time."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - began_s

    def record_evaluation(self, step: int, split: str, loss: float) -> None:
        """Report the loss on data of ``split``."""
        self._console.print(f"step {step:>{len(str(self._train_iters))}}/{self._train_iters} | {split} loss {loss:.6f}")
        if self._writer is not None:
            self._writer.add_scalar(f"lm loss {split}", loss, step)

    def _begin_interval(self) -> None:
        self._started = time.perf_counter()
        self._steps = 0
        self._losses: list[float] = []

    def _report(self, step: int, result: StepResult, lr: float) -> None:
        loss = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        timing = self._timing()
        told = [
            f"step {step:>{len(str(self._train_iters))}}/{self._train_iters}",
            f"loss {loss:.6f}",
            f"grad norm {result.grad_norm:.4f}",
            f"lr {lr:.3e}",
        ]
        if timing is None:
            told.append("warming up")
        else:
            emulated = "" if self._emulated is None else "emulated "
            told += [
                f"{timing['samples-per-second']:.1f} samples/s",
                f"{timing['tokens-per-second']:,.0f} tokens/s",
                f"{emulated}step time {timing['iteration-time'] * 1e3:.1f} ms",
            ]
        told.append(f"skipped {self._skipped_total}")
        if result.loss_scale != 1:
            told.append(f"loss scale {result.loss_scale:.0f}")
        self._console.print(" | ".join(told))
        if self._writer is not None:
            scalars = {
                "lm loss": loss,
                "grad-norm": result.grad_norm,
                "learning-rate": lr,
                **(timing or {}),
                "skipped-iterations": self._skipped_total,
            }
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def _timing(self) -> dict[str, float] | None:
        """Compute the speed over the interval, by TensorBoard's names; ``None`` if no step of it was timed."""
        if not self._steps:
            return None
        step_s = (time.perf_counter() - self._started) / self._steps / self._time_scale
        samples_per_s = self._global_batch_size / step_s
        return {
            "samples-per-second": samples_per_s,
            "tokens-per-second": samples_per_s * self._seq_length,
            "iteration-time": step_s,
        }


def check_tensorboard(folder: Path | None) -> None:
    """Fail before training if files are asked for that cannot be written.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder cannot be made.
    """
    if folder is None:
        return
    require("tensorboard", asked_by=f"--tensorboard-dir {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--tensorboard-dir {folder}: cannot be made: {error.strerror}; name another") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--tensorboard-dir {folder}: may not be written; name another, or change its permissions")


def _summary_writer(folder: Path) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional)

    return SummaryWriter(log_dir=str(folder))
