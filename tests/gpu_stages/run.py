"""Runs stages one after the other, those that measure nothing also at the same time, and writes each result at once."""

import contextlib
import datetime
import fcntl
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.gpu_stages.outcomes import FILE_VARIABLE
from tests.gpu_stages.processes import Ended, kill_marked, new_mark, run_limited
from tests.gpu_stages.report import write_report
from tests.gpu_stages.results import (
    StageResult,
    errors_file,
    load_results,
    outcomes_file,
    output_file,
    save_result,
)
from tests.gpu_stages.stages import Stage
from tests.gpu_stages.target import Target
from tests.helpers.sources import ROOT

LEAST_SECONDS = 8.0
"""A stage that would have less than these is not started: a process takes as long to import torch."""


ONE_HOST: Mapping[str, str] = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of stages, whose ranks are on this host: it may have no network, and a name that nothing resolves."""


EXIT_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Besides Ctrl-C. The second one comes when a terminal is closed; under nohup it is ignored, and stays so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How stages run.

    out: folder of results.
    together: stages that may run at the same time.
    limit_scale: the stages' limits are multiplied by it.
    total_s: seconds of the whole run, after which a stage that runs is killed; None is without a limit.
    """

    target: Target
    out: Path
    together: int = 1
    limit_scale: float = 1.0
    total_s: float | None = None


class StageRun:
    """One run: its clock, and the results and the report that grow with it."""

    def __init__(self, options: RunOptions) -> None:
        self.options = options
        self.commit = commit_of(ROOT)
        self._end_s = time.monotonic() + options.total_s if options.total_s is not None else float("inf")
        self._is_interrupted = False
        self._writing = threading.Lock()
        self._marks: set[str] = set()

    def run(self, stages: Sequence[Stage]) -> bool:
        """Run ``stages`` and return whether some have passed and none has failed. A signal ends those that run.

        Raises:
            FolderInUseError: another run writes into the same folder.
        """
        with (
            lock_folder(self.options.out),
            _exit_on_signals(),
            ThreadPoolExecutor(max(1, self.options.together)) as pool,
        ):
            outcomes: list[str] = []
            try:
                for batch in _batches(stages):
                    outcomes += [result.outcome for result in pool.map(self.run_stage, batch)]
            except BaseException:
                self._interrupt(pool)
                raise
        return "passed" in outcomes and set(outcomes) <= {"passed", "not run"}

    def _interrupt(self, pool: ThreadPoolExecutor) -> None:
        """End the stages that run; a second signal does not leave half of their processes."""
        for number in (signal.SIGINT, *EXIT_SIGNALS):
            signal.signal(number, signal.SIG_IGN)
        self._is_interrupted = True
        self._end_s = 0.0
        pool.shutdown(wait=False, cancel_futures=True)
        # A stage may be about to start its process.
        while self._marks:
            for mark in tuple(self._marks):
                kill_marked(mark)
            time.sleep(0.02)

    def run_stage(self, stage: Stage) -> StageResult:
        """Run ``stage``, unless something forbids it, and write its result."""
        began = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        limit_s = min(stage.limit_s * self.options.limit_scale, self._end_s - time.monotonic())
        reason = self._reason_not_to_run(stage, limit_s)
        ended = None if reason is not None else self._run_command(stage, limit_s)
        outcome, detail = ("not run", reason or "") if ended is None else describe_end(ended, limit_s)
        if outcome == "over its limit" and limit_s < stage.limit_s * self.options.limit_scale:
            detail += "; the time of the whole run was over"
        if ended is not None and self._is_interrupted:
            outcome, detail = "interrupted", "the run was ended by a signal"
        result = StageResult(
            name=stage.name,
            shows=stage.shows,
            outcome=outcome,
            began=began,
            commit=self.commit,
            device=self.options.target.name,
            detail=detail,
            seconds=round(ended.seconds, 1) if ended is not None else 0.0,
            limit_s=round(limit_s, 1) if ended is not None else stage.limit_s * self.options.limit_scale,
        )
        with self._writing:
            save_result(self.options.out, result)
            write_report(self.options.out, self.options.target)
            print(
                f"== {result.name}: {result.outcome}, {result.seconds:g} s{f' ({detail})' if detail else ''}",
                flush=True,
            )
        return result

    def _reason_not_to_run(self, stage: Stage, limit_s: float) -> str | None:
        """Return why ``stage`` cannot run, None if it can."""
        if limit_s < min(LEAST_SECONDS, stage.limit_s):
            return "no time is left"
        if stage.needs_engine and self.options.target.device == "cpu":
            return "TransformerEngine runs on CUDA alone"
        if stage.needs_engine and importlib.util.find_spec("transformer_engine") is None:
            return "TransformerEngine is not installed"
        with self._writing:
            outcomes = {result.name: result.outcome for result in load_results(self.options.out)}
        if stage.needs is not None and outcomes.get(stage.needs, "passed") != "passed":
            return f"it needs {stage.needs}, which has not passed"
        return None

    def _run_command(self, stage: Stage, limit_s: float) -> Ended:
        mark = new_mark()
        out = self.options.out
        variables = {FILE_VARIABLE: str(outcomes_file(out, stage.name)), "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
        self._marks.add(mark)
        try:
            return run_limited(
                [sys.executable, "-W", "ignore", *stage.command],
                limit_s=limit_s,
                mark=mark,
                environment={**ONE_HOST, **os.environ, "OMP_NUM_THREADS": "1", **variables},
                out=output_file(out, stage.name),
                errors=errors_file(out, stage.name),
            )
        finally:
            self._marks.discard(mark)


def _batches(stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Yield the stages that may run at the same time."""
    for is_alone, batch in itertools.groupby(stages, key=lambda stage: stage.is_alone):
        together = list(batch)
        yield from ([stage] for stage in together) if is_alone else [together]


def describe_end(ended: Ended, limit_s: float) -> tuple[str, str]:
    """Return the outcome of a stage and why."""
    if ended.exit_code is None:
        return "over its limit", f"killed after {limit_s:.3g} s, {ended.num_left} processes in all"
    left = f"processes that it left running and that were killed: {ended.num_left}" if ended.num_left else ""
    if ended.exit_code == 0:
        return "passed", left
    return "failed", "; ".join(filter(None, (f"exit code {ended.exit_code}", left)))


def commit_of(checkout: Path) -> str:
    """Return the commit of ``checkout``, with "-dirty" if its files differ from it; "" where that is not known.

    The repository has to be that of the checkout: a copy without history may lie in a folder of another repository.
    """
    lines = []
    for arguments in (("rev-parse", "--show-toplevel"), ("describe", "--always", "--dirty", "--exclude=*")):
        try:
            done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        lines.append(done.stdout.strip())
    return lines[1] if lines[0] and Path(lines[0]).resolve() == checkout.resolve() else ""


class FolderInUseError(Exception):
    """Another run writes into the folder of results."""


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep other runs from writing into it; the lock ends with this process, however it ends.

    Raises:
        FolderInUseError: another run has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(
                f"another run writes into {folder}: wait until it has ended, or name another folder by --out"
            ) from None
        yield


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise ``SystemExit`` on a signal of ``EXIT_SIGNALS``, so that stages are ended; restore all handlers after it."""
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, *EXIT_SIGNALS)}
    for number in EXIT_SIGNALS:
        if earlier[number] is not signal.SIG_IGN:
            signal.signal(number, _end_on_signal)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _end_on_signal(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
