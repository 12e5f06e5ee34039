"""Watches the ranks of a node through an epoch: what they report, how they end, and what that means for the epoch."""

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.events import EventKind, EventLog
from hetero.elastic.exhaustion import is_exhaustion
from hetero.elastic.fork_server import ForkServer
from hetero.elastic.rank_processes import RankProcesses
from hetero.elastic.rank_reports import RankReports
from hetero.elastic.records import Epoch, RankAssignment, RankPhase, RankReport, UploadSchedule

_SHOWN = 300
"""Characters of an error in a reason; its log has all of it."""

_LAST_WORDS_S = 0.3
"""Between the end of a rank and the arrival of what it said before."""

_STEPS: tuple[tuple[RankPhase, EventKind], ...] = (
    ("joined", "joined"),
    ("built", "built"),
    ("restored", "restored"),
    ("step", "first_step"),
)
"""What is noted once all ranks of the node have come to it."""

_PROGRESS_SHARE = 0.01
"""Of the age of an epoch, between two notes of its progress, so that a log stays short however long a run; but at least
a second. A heuristic."""


class RankListener(Protocol):
    """Whom a watch tells what has happened."""

    def news(self, *, urgent: bool) -> None:
        """A rank has reported, or ended; ``urgent`` if somebody may wait for it."""

    def epoch_broke(self, epoch: int, reason: str) -> None:
        """A rank has failed."""

    def first_commit(self, epoch: int) -> None:
        """A step of this epoch is committed, or the one that it has restored."""

    def bad_copy(self, detail: str) -> None:
        """A rank has met one."""


class RankWatch:
    """Attributes:
    processes: the ranks.
    epoch: whose ranks they are; ``None`` before the first.
    """

    def __init__(
        self,
        options: AgentOptions,
        fork_server: ForkServer,
        *,
        events: EventLog,
        listener: RankListener,
        show: Callable[[str], None],
    ) -> None:
        self.epoch: Epoch | None = None
        self.processes = RankProcesses(fork_server, on_end=self._ended, show=show)
        self._options = options
        self._events = events
        self._listener = listener
        self._reports = RankReports(self._take)
        self._noted: set[EventKind] = set()
        self._over = True
        self._met_bad_copies = False
        self._began_s = self._next_note_s = 0.0

    async def listen(self) -> None:
        """Take reports from now on."""
        await self._reports.listen(self._options.reports_socket)

    def close(self) -> None:
        """Take no more."""
        self._reports.close()
        # The folder of copies may have become read-only.
        with contextlib.suppress(OSError):
            self._options.reports_socket.unlink(missing_ok=True)

    @property
    def reports(self) -> tuple[RankReport, ...]:
        """The last of each rank, in the order of ranks."""
        return tuple(report for _, report in sorted(self._reports.latest.items()))

    @property
    def step(self) -> int:
        """The last that is done."""
        return max((report.step for report in self.reports), default=0)

    @property
    def can_stop(self) -> bool:
        """Whether all ranks here take SIGTERM for a request; before they train it would kill them."""
        ranks = () if self.epoch is None else self._ranks_of(self.epoch)
        return self._reports.have_all("restored", ranks)

    @property
    def committed(self) -> int:
        """The last step that is known to be committed."""
        return max((report.committed for report in self.reports), default=0)

    @property
    def logs(self) -> Path:
        """Where ranks print."""
        return self._options.logs / self._options.name

    def start(self, epoch: Epoch, *, token: str, uploads: UploadSchedule | None) -> None:
        """Start this node's ranks of ``epoch``.

        Raises:
            OSError: for lack of descriptors or memory; no rank runs then, and they can be started again.
        """
        options = self._options
        self.epoch, self._noted, self._over, self._met_bad_copies = epoch, set(), False, False
        self._reports.begin(epoch.number)
        self._began_s = self._next_note_s = time.monotonic()
        assignment = RankAssignment(
            job=options.job,
            epoch=epoch,
            node=options.name,
            token=token,
            folder=str(options.folder),
            reports=str(options.reports_socket),
            object_store=options.object_store,
            uploads=uploads,
            trust=options.trust,
        )
        settings = options.settings
        try:
            self.processes.start(
                assignment, program=settings.program, flags=settings.flags, files=options.folder, logs=self.logs
            )
        except OSError as error:
            if is_exhaustion(error):
                raise
            # The memory that copies fill may be full; this agent has to go on serving them.
            fix = "make room there, or name another folder (--copies)"
            detail = f"cannot be started: {options.folder}: {error.strerror or error}; {fix}"
            self._take(RankReport(epoch=epoch.number, rank=self._ranks_of(epoch)[0], phase="failed", detail=detail))
            return
        names = tuple(each.node.name for each in epoch.nodes)
        self._events.note("forked", epoch=epoch.number, step=epoch.start.step, nodes=names, detail=epoch.reason)

    async def end(self, reason: str) -> None:
        """Kill all ranks, and wait until they are gone; what they say from now on does not count."""
        self._over = True
        had_ranks = bool(self.processes.running)
        await self.processes.kill()
        if had_ranks:
            self._events.note(
                "ranks_gone", epoch=self.processes.epoch, step=self.step, committed=self.committed, detail=reason
            )

    def _ended(self, epoch: int, rank: int, code: int) -> None:
        """A rank's process is gone; what it said last may still be on its way."""

        def judge() -> None:
            if self._over or self.epoch is None or epoch != self.epoch.number:
                return
            last = self._reports.latest.get(rank)
            phase = None if last is None else last.phase
            if phase not in ("stopped", "finished", "failed"):
                self._take(
                    RankReport(
                        epoch=epoch,
                        rank=rank,
                        phase="failed",
                        step=0 if last is None else last.step,
                        detail=self._meaning(code, phase),
                        is_wrong_input=code == 2,
                    )
                )
            self._listener.news(urgent=True)

        if code < 0:
            judge()
        else:
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, judge)
        self._listener.news(urgent=False)

    def _meaning(self, code: int, phase: RankPhase | None) -> str:
        if code == -signal.SIGTERM and phase != "step":
            return "was asked to stop before its first step"
        if code < 0:
            return f"was killed by signal {-code}"
        return f"ended with the code {code}; see {self.logs}"

    def _take(self, report: RankReport) -> None:
        epoch = self.epoch
        if epoch is None or report.epoch != epoch.number or self._over:
            return
        last = self._reports.latest.get(report.rank)
        # A plan that does not suit a rank, or a copy that is damaged, is not what the user gave.
        if self._met_bad_copies or (last is not None and last.phase == "joined"):
            report = dataclasses.replace(report, is_wrong_input=False)
        self._reports.latest[report.rank] = report
        ranks = self._ranks_of(epoch)
        for phase, kind in _STEPS:
            if kind not in self._noted and self._reports.have_all(phase, ranks):
                self._note_once(kind, step=report.step)
        if report.committed > 0 and report.committed >= epoch.start.step and "committed" not in self._noted:
            self._note_once("committed", step=report.committed)
            self._listener.first_commit(epoch.number)
        self._note_progress(report)
        if report.phase == "bad_copy":
            self._met_bad_copies = True
            self._events.note("bad_copy", epoch=epoch.number, detail=report.detail)
            self._listener.bad_copy(report.detail)
        if report.phase == "failed" and "rank_failed" not in self._noted:
            said = " ".join(report.detail.split())[:_SHOWN] or "failed"
            reason = f"rank {report.rank} on node {self._options.name}: {said}"
            self._note_once("rank_failed", step=report.step, detail=reason)
            self._listener.epoch_broke(epoch.number, reason)
        self._listener.news(urgent=report.phase != "step" or report.step <= epoch.start.step + 1)

    def _ranks_of(self, epoch: Epoch) -> tuple[int, ...]:
        return next((each.ranks for each in epoch.nodes if each.node.name == self._options.name), ())

    def _note_progress(self, report: RankReport) -> None:
        now_s = time.monotonic()
        phases = {each.phase for each in self.reports}
        if phases == {"stopped"}:
            self._note_once("stopped", step=report.step)
        elif phases == {"finished"} or (report.phase == "step" and now_s >= self._next_note_s):
            self._next_note_s = now_s + max(1.0, _PROGRESS_SHARE * (now_s - self._began_s))
            self._note("progress", step=self.step)

    def _note(self, kind: EventKind, *, step: int, detail: str = "") -> None:
        assert self.epoch is not None
        self._events.note(kind, epoch=self.epoch.number, step=step, committed=self.committed, detail=detail)

    def _note_once(self, kind: EventKind, *, step: int, detail: str = "") -> None:
        self._noted.add(kind)
        self._note(kind, step=step, detail=detail)
