"""Tells a rank's agent how far the rank is, one datagram each.

A report of a step is dropped if the agent has not read the ones before: the next says more. For all others a rank waits
a moment.
"""

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hetero.distributed.rank_consensus import is_wrong_input
from hetero.elastic.records import RankAssignment, RankPhase, RankReport
from hetero.serialization import to_compact_json
from hetero.shown_secrets import without_secrets

_MAX_DETAIL = 2000
"""Characters of an error; a datagram has a limit."""


_PATIENCE_S = 1.0
"""With an agent that does not read."""


class RankReporter:
    """Sends the reports of one rank. An agent that is gone hears none."""

    def __init__(self, assignment: RankAssignment, rank: int) -> None:
        self._epoch = assignment.epoch.number
        self._rank = rank
        self._address = assignment.reports
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._has_failed = False

    def report(
        self,
        phase: RankPhase,
        *,
        step: int = 0,
        committed: int = 0,
        step_s: float = 0.0,
        compute_s: float = 0.0,
        copy_every: int = 0,
        detail: str = "",
    ) -> None:
        """Send one :class:`hetero.elastic.records.RankReport`."""
        report = RankReport(
            epoch=self._epoch,
            rank=self._rank,
            phase=phase,
            step=step,
            committed=committed,
            step_s=step_s,
            compute_s=compute_s,
            copy_every=copy_every,
            detail=detail,
        )
        self._send(report)

    @contextmanager
    def of_failures(self) -> Iterator[None]:
        """Report the first exception that leaves the block, before anybody asks which rank it was."""
        try:
            yield
        except BaseException as error:
            if not self._has_failed:
                self._has_failed = True
                message = " ".join(without_secrets(str(error)).split())
                self._send(
                    RankReport(
                        epoch=self._epoch,
                        rank=self._rank,
                        phase="failed",
                        detail=f"{type(error).__name__}: {message}"[:_MAX_DETAIL],
                        is_wrong_input=is_wrong_input(error),
                    )
                )
            raise

    def _send(self, report: RankReport) -> None:
        self._socket.settimeout(0.0 if report.phase == "step" else _PATIENCE_S)
        with contextlib.suppress(OSError):
            self._socket.sendto(to_compact_json(report), self._address)
