"""Takes the reports of a node's ranks: datagrams on a socket in a folder that only the node's user can enter."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.elastic.records import RankPhase, RankReport
from hetero.errors import ConfigError
from hetero.peer_limits import MAX_REPORT_BYTES
from hetero.serialization import from_json

_ORDER: tuple[RankPhase, ...] = ("joined", "built", "restored", "step")
"""Of the phases that every rank goes through."""


class RankReports(asyncio.DatagramProtocol):
    """Attributes:
    epoch: whose reports count.
    latest: the last report by rank, which ``on_report`` puts there.
    wrong: what came and was no report, for people.
    """

    def __init__(self, on_report: Callable[[RankReport], None]) -> None:
        self.epoch = 0
        self.latest: dict[int, RankReport] = {}
        self.wrong = ""
        self._on_report = on_report
        self._transport: Any = None

    async def listen(self, path: Path) -> None:
        """Take datagrams on a socket at ``path``; what an agent left there before gives way.

        Raises:
            ConfigError: there can be no socket.
        """
        loop = asyncio.get_running_loop()
        try:
            path.unlink(missing_ok=True)
            # 1 is AF_UNIX; asyncio binds the path itself.
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=str(path), family=1)
            path.chmod(0o600)
        except OSError as error:
            raise ConfigError(
                f"{path}: no socket can be there: {error.strerror or error}; name another folder (--copies), with a "
                "path of at most 90 characters, on a local file system such as /dev/shm"
            ) from None

    def close(self) -> None:
        """Take no more."""
        if self._transport is not None:
            self._transport.close()

    def begin(self, epoch: int) -> None:
        """From here on only reports of this epoch count."""
        self.epoch, self.latest = epoch, {}

    def datagram_received(self, data: bytes, address: object) -> None:
        """Take one report; one of an earlier epoch is late and says nothing any more."""
        if len(data) > MAX_REPORT_BYTES:
            self.wrong = f"report of a rank: {len(data):,} bytes; at most {MAX_REPORT_BYTES:,} are read"
            return
        try:
            report = from_json(RankReport, data.decode(), source="report of a rank")
        except (ConfigError, UnicodeDecodeError) as error:
            self.wrong = str(error)
            return
        if report.epoch == self.epoch:
            self._on_report(report)

    def have_all(self, phase: RankPhase, ranks: tuple[int, ...]) -> bool:
        """Whether all of ``ranks`` have come to ``phase``, or are beyond it."""
        beyond = (*_ORDER[_ORDER.index(phase) :], "stopped", "finished")
        return all(rank in self.latest and self.latest[rank].phase in beyond for rank in ranks)
