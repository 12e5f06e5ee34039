"""Reports on a training run: a log line per interval, figures for TensorBoard and its likes, progress on a terminal."""

import datetime
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetero.console import console as make_console
from hetero.cost.model_flops import DeviceWork, Products
from hetero.emulation.cluster.timing import EmulatedTiming
from hetero.plan.batch_sizes import BatchSizes
from hetero.runtime.optimizer import StepResult
from megatron.pretrain.cli.logging_config import LoggingConfig, ScalarsConfig
from megatron.pretrain.scalar_writers import ScalarWriter

_MOST_NATS = 20.0
"""Of a loss whose perplexity is told, as in Megatron-LM: that of an untrained model may be too large for a number."""

_LEAST_TOLD_S = 0.05

LearningRates = tuple[float, float | None]
"""Of a step: the usual one, and that of embedding and output layer where they have their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """What is reported on.

    work: of a step of the whole batch on each device type; empty where nobody asks.
    emulated: where a cluster is emulated; times are then emulated ones, and the first step, which only warms up, has
        none.
    """

    train_iters: int
    batches: BatchSizes
    seq_length: int
    world_size: int
    work: Mapping[Products, DeviceWork] = field(default_factory=dict)
    emulated: EmulatedTiming | None = None


@dataclass(slots=True)
class _Interval:
    """Steps since the last report: when the first began, how many were timed, their samples and their losses."""

    started_s: float = field(default_factory=lambda: time.perf_counter())
    steps: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The mean of those that were not skipped."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")


@dataclass(frozen=True, slots=True)
class _Speed:
    """Means over the steps of an interval, in emulated seconds where a cluster is emulated."""

    step_s: float
    samples_per_step: float

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.step_s


class Metrics:
    """Averages over the steps of an interval and reports them. Only one rank of a launch has one.

    Context manager: leaves the terminal and the files in order, and tells where the time of the run went.
    """

    def __init__(
        self, run: ReportedRun, logging: LoggingConfig, scalars: ScalarsConfig, writers: Sequence[ScalarWriter] = ()
    ) -> None:
        self._run = run
        self._logging = logging
        self._scalars = scalars
        self._writers = writers
        self._warms_up = run.emulated is not None
        # A wide fixed width keeps one report on one line also where the output is a file.
        console = make_console(width=None, highlight=False, soft_wrap=True)
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (logging.progress and console.is_terminal),
        )
        self._task = self._progress.add_task("train", total=run.train_iters, loss="-")
        self._skipped_total = 0
        self._seconds: dict[str, float] = {}
        self._lines, self._writes = _Interval(), _Interval()
        self._began_s = self._lines.started_s

    @property
    def _time_scale(self) -> float:
        return self._run.emulated.time_scale if self._run.emulated is not None else 1.0

    def __enter__(self) -> "Metrics":
        self._progress.start()
        self._lines, self._writes = _Interval(), _Interval()
        self._began_s = self._lines.started_s
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        for writer in self._writers:
            writer.close()

    def record(self, step: int, result: StepResult, *, rates: LearningRates, num_samples: int) -> None:
        """Count step number ``step`` (from 1); report if it ends an interval or the run."""
        for interval in (self._lines, self._writes):
            interval.steps += 1
            interval.samples += num_samples
            if not result.skipped:
                interval.losses.append(result.loss)
        if self._warms_up:
            if (scale := self._time_scale) != 1:
                self._console.print(f"an emulated second takes {scale:g} s on this machine")
            for interval in (self._lines, self._writes):
                interval.started_s, interval.steps, interval.samples = time.perf_counter(), 0, 0
        self._skipped_total += result.skipped
        self._progress.update(self._task, completed=step, loss=f"{result.loss:.4f}")
        ends = step == self._run.train_iters or result.stop
        if self._writers and (step % self._scalars.interval == 0 or ends):
            self.write(self._figures(result, rates=rates, num_samples=num_samples), step)
            self._writes = _Interval()
        if step % self._logging.log_interval == 0 or ends:
            self._console.print(self._line(step, result, lr=rates[0]))
            self._lines = _Interval()
        self._warms_up = False

    @contextmanager
    def outside_steps(self, doing: str) -> Iterator[None]:
        """Leave the time of the block, such as ``saving``, out of the step time, and count it by itself."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_s
            self._lines.started_s += seconds
            self._writes.started_s += seconds
            self._seconds[doing] = self._seconds.get(doing, 0.0) + seconds

    def record_evaluation(self, step: int, split: str, loss: float) -> None:
        """Report the loss on data of ``split``."""
        self.say(f"step {step:>{len(str(self._run.train_iters))}}/{self._run.train_iters} | {split} loss {loss:.6f}")
        scalars = {f"lm loss {split}": loss}
        if self._scalars.validation_ppl:
            scalars[f"lm loss {split} ppl"] = math.exp(min(_MOST_NATS, loss))
        self.write(scalars, step)

    def say(self, told: RenderableType) -> None:
        """Print a line or a table beside the progress bar."""
        self._console.print(told)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Hand figures of ``step`` to all writers."""
        for writer in self._writers:
            writer.write(scalars, step)

    def say_where_time_went(self) -> None:
        """Tell the seconds of the loop over the steps, by what was done in them."""
        told = [f"{what} {seconds:.1f}" for what, seconds in self._seconds_so_far().items() if seconds >= _LEAST_TOLD_S]
        self.say(f"seconds: {', '.join(told)}")

    def _seconds_so_far(self) -> dict[str, float]:
        training_s = time.perf_counter() - self._began_s - sum(self._seconds.values())
        return {"training": training_s, **self._seconds}

    def _line(self, step: int, result: StepResult, *, lr: float) -> str:
        speed = self._speed(self._lines)
        run = self._run
        told = [
            f"step {step:>{len(str(run.train_iters))}}/{run.train_iters}",
            *([f"batch {run.batches.size(step - 1)}"] if run.batches.varying_batch is not None else []),
            f"loss {self._lines.loss:.6f}",
            f"grad norm {result.grad_norm:.4f}",
            f"lr {lr:.3e}",
        ]
        if speed is None:
            told.append("warming up")
        else:
            emulated = "" if self._run.emulated is None else "emulated "
            told += [
                f"{speed.samples_per_s:.1f} samples/s",
                f"{speed.samples_per_s * self._run.seq_length:,.0f} tokens/s",
                f"{emulated}step time {speed.step_s * 1e3:.1f} ms",
            ]
        told.append(f"skipped {self._skipped_total}")
        if result.loss_scale != 1:
            told.append(f"loss scale {result.loss_scale:.0f}")
        if speed is not None:
            if self._logging.throughput:
                told += list(self._throughput_in_words(speed))
            left = run.batches.first_sample(run.train_iters) - run.batches.first_sample(step)
            left_s = left / speed.samples_per_s * self._time_scale
            told.append(f"ETA {datetime.timedelta(seconds=round(left_s))}")
        return " | ".join(told)

    def _figures(self, result: StepResult, *, rates: LearningRates, num_samples: int) -> dict[str, float]:
        """What the writers get of the steps since the last write, by TensorBoard's names."""
        wanted, speed = self._scalars, self._speed(self._writes)
        found = {
            "lm loss": self._writes.loss,
            "grad-norm": result.grad_norm,
            "skipped-iterations": float(self._skipped_total),
        }
        if speed is not None:
            found["iteration-time"] = speed.step_s
            found["samples-per-second"] = speed.samples_per_s
            found["tokens-per-second"] = speed.samples_per_s * self._run.seq_length
            for products, tflops, mfu in self._throughput(speed):
                found[f"throughput/{products.device}"] = tflops
                if mfu is not None:
                    found[f"mfu/{products.device}"] = mfu
        if wanted.learning_rate:
            lr, decoupled = rates
            found |= {"learning-rate": lr} | ({"decoupled-learning-rate": decoupled} if decoupled is not None else {})
        if wanted.loss_scale and result.loss_scale != 1:
            found["loss-scale"] = result.loss_scale
        if wanted.batch_size:
            found["batch-size"] = num_samples
        if wanted.world_size:
            found["world-size"] = self._run.world_size
        if wanted.timers:
            found |= {f"seconds/{what}": each for what, each in self._seconds_so_far().items()}
        return found

    def _throughput(self, speed: _Speed) -> Iterator[tuple[Products, float, float | None]]:
        """Of each device type, TFLOP/s of one device and its MFU."""
        # Of a smaller batch the work is that much less; who has which share of it is as in a whole one.
        whole_s = speed.step_s * self._run.batches.full / speed.samples_per_step
        for products, work in self._run.work.items():
            yield products, work.flops_per_s(whole_s) / 1e12, work.mfu(whole_s)

    def _throughput_in_words(self, speed: _Speed) -> Iterator[str]:
        for products, tflops, mfu in self._throughput(speed):
            share = f" (MFU {mfu:z.1%})" if mfu is not None else ""
            yield f"{products.device} {tflops:.3g} TFLOP/s{share}"

    def _speed(self, interval: _Interval) -> _Speed | None:
        """The speed over an interval, ``None`` if no step of it was timed."""
        if not interval.steps:
            return None
        step_s = (time.perf_counter() - interval.started_s) / interval.steps / self._time_scale
        return _Speed(step_s, interval.samples / interval.steps)
