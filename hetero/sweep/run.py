"""Plans the combinations of a sweep, several at a time, and stores each outcome when it is there."""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait

from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.report.sweep_rows import SweepRow
from hetero.sweep.combinations import Combination
from hetero.sweep.folder import SweepFolder


@dataclass(frozen=True, slots=True)
class SweepStatus:
    """How far a sweep is, after a row.

    done: rows that are there; ``stored`` of them were there before.
    elapsed_s: since the first of the others was begun.
    """

    row: SweepRow
    done: int
    stored: int
    total: int
    elapsed_s: float

    @property
    def left_s(self) -> float | None:
        """Estimate of the seconds to the end, as if the rest took as long as what was planned so far; ``None`` before
        anything was."""
        planned = self.done - self.stored
        return None if planned == 0 else self.elapsed_s / planned * (self.total - self.done)


def run_sweep(
    combinations: Sequence[Combination],
    folder: SweepFolder,
    *,
    jobs: int,
    fresh: bool,
    report: Callable[[SweepStatus], None],
) -> tuple[SweepRow, ...]:
    """The rows of all combinations, in their order; what the folder has of them is not planned again.

    jobs: so many are planned at a time, each in a process of its own.
    fresh: plan everything again.
    report: called after every row that was planned.

    Raises:
        ConfigError: a process that planned was killed.
    """
    rows: dict[int, SweepRow] = {}
    for i, combination in enumerate(combinations):
        row = None if fresh else folder.row(combination.key)
        if row is not None:
            # The same inputs may have had other names.
            rows[i] = dataclasses.replace(row, cluster=combination.cluster_name, model=combination.model_name)
    stored, start_s = len(rows), time.monotonic()
    missing = [i for i in range(len(combinations)) if i not in rows]
    for i, (row, plan) in _evaluated(combinations, missing, jobs):
        folder.keep(row, plan)
        rows[i] = row
        elapsed_s = time.monotonic() - start_s
        report(SweepStatus(row, len(rows), stored, len(combinations), elapsed_s))
    return tuple(rows[i] for i in range(len(combinations)))


def _evaluated(
    combinations: Sequence[Combination], missing: Sequence[int], jobs: int
) -> Iterator[tuple[int, tuple[SweepRow, Plan | None]]]:
    """The outcomes as they come."""
    # OR-Tools takes a second to load; a file that is wrong is told before.
    from hetero.sweep.evaluate import evaluate

    if jobs == 1 or len(missing) < 2:
        yield from ((i, evaluate(combinations[i])) for i in missing)
        return
    # Not forked: CP-SAT's threads do not survive that.
    pool = ProcessPoolExecutor(
        min(jobs, len(missing)), mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
    )
    try:
        futures: dict[Future[tuple[SweepRow, Plan | None]], int] = {
            pool.submit(evaluate, combinations[i]): i for i in missing
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ConfigError(
            "a process that planned was killed, perhaps for its memory; the same command goes on from what is stored; "
            "--jobs 1 takes the least memory"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    """End with the sweep, however that ends, and without a traceback at Ctrl-C, of which the sweep tells."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by one"
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
