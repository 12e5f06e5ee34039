"""What an agent does when it runs out of descriptors or memory, and what of it is said."""

import asyncio
import dataclasses
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.elastic import exhaustion
from hetero.elastic.error_log import ErrorLog
from hetero.elastic.etcd_errors import store_error
from hetero.elastic.exhaustion import Exhaustion, exhaustion_of, is_exhaustion
from hetero.elastic.fork_server import ForkServer
from hetero.elastic.rank_processes import RankProcesses
from hetero.elastic.records import EpochNode, RankAssignment
from hetero.errors import ConfigError
from hetero.peer_limits import ERRORS_PER_MINUTE, descriptor_limit
from hetero.serialization import read_bytes
from tests.helpers.elastic_epochs import epoch_of, node_info

LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Work:
    """Work that fails with each of these errors, and then comes through."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustion, "_RETRY_S", 0.0)


@pytest.mark.parametrize("number", LACKS, ids=errno.errorcode.get)
def test_work_is_done_again_until_it_comes_through_and_that_is_said_once(number: int) -> None:
    said: list[str] = []
    work = Work(*(failing(number) for _ in range(5)))
    assert asyncio.run(Exhaustion(said.append).outlive(work)) == "done"
    assert len(said) == 1
    assert said[0].endswith("; it is tried again")


def test_what_is_lacking_is_named_with_its_fix() -> None:
    assert exhaustion_of(failing(errno.EMFILE)) == (
        f"this process has {descriptor_limit():,} files open, its limit; raise that (ulimit -Hn, LimitNOFILE=)"
    )
    assert "sysctl fs.file-max" in exhaustion_of(failing(errno.ENFILE))
    assert "No buffer space available" in exhaustion_of(failing(errno.ENOBUFS))


@pytest.mark.parametrize(
    "error", [failing(errno.ENOSPC), failing(errno.ECONNREFUSED), ConfigError("wrong"), ValueError()]
)
def test_other_errors_stay(error: Exception) -> None:
    said: list[str] = []
    with pytest.raises(type(error)):
        asyncio.run(Exhaustion(said.append).outlive(Work(error)))
    assert said == []


def test_an_error_that_hides_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Messages for users are raised from none; what caused them still counts."""

    def fail(*_: object, **__: object) -> None:
        raise failing(errno.EMFILE)

    (tmp_path / "file").touch()
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ConfigError) as caught:
        read_bytes(tmp_path / "file")
    assert is_exhaustion(caught.value)


def test_it_is_said_of_etcd() -> None:
    error = store_error(failing(errno.EMFILE), ["http://a:2379"], request_bytes=1)
    assert str(error).startswith("etcd at http://a:2379 cannot be asked: this process has ")


class FakeProcess:
    """A rank's process that notes what is done to it."""

    def __init__(self) -> None:
        self.sentinel, self._other_end = os.pipe()
        self.calls: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def join(self) -> None:
        self.calls.append("join")

    def close(self) -> None:
        self.calls.append("close")
        os.close(self.sentinel)
        os.close(self._other_end)


def test_ranks_are_started_all_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the second cannot be started the first is ended, and both can be started again."""
    epoch = dataclasses.replace(epoch_of([node_info("a")]), nodes=(EpochNode(node=node_info("a"), ranks=(0, 1)),))
    started: list[FakeProcess] = []
    failures = [None, failing(errno.EMFILE), None, None]

    def start_rank(*_: object, **__: object) -> FakeProcess:
        if (failure := failures.pop(0)) is not None:
            raise failure
        started.append(FakeProcess())
        return started[-1]

    async def story() -> None:
        server = ForkServer()
        monkeypatch.setattr(server, "start_rank", start_rank)
        processes = RankProcesses(server, on_end=lambda *_: None, show=lambda _: None)
        assignment = RankAssignment(
            job="job", epoch=epoch, node="a", token="t", folder=str(tmp_path), reports=str(tmp_path / "reports")
        )

        def start() -> None:
            processes.start(assignment, program="program", flags=(), files=tmp_path, logs=tmp_path)

        with pytest.raises(OSError, match="Too many open files"):
            start()
        assert processes.running == {}
        assert processes.epoch == 0
        assert [each.calls for each in started] == [["kill", "join", "close"]]
        start()
        assert list(processes.running) == [0, 1]
        assert processes.epoch == epoch.number
        await processes.kill()

    asyncio.run(story())


class TestErrorLog:
    def logger(self, write: Callable[[str], object], clock: Callable[[], float]) -> logging.Logger:
        logger = logging.Logger("asyncio")
        logger.addHandler(ErrorLog(write, clock=clock))
        return logger

    def test_a_minute_has_so_many_errors_and_the_others_are_counted(self) -> None:
        written: list[str] = []
        times_s = iter([0.0] * 5000 + [61.0])
        logger = self.logger(written.append, lambda: next(times_s))
        for number in range(5000):
            logger.error("connection %d", number)
        assert written == [f"hetero: asyncio: connection {number}\n" for number in range(ERRORS_PER_MINUTE)]
        logger.error("one more")
        assert written[ERRORS_PER_MINUTE:] == [
            f"hetero: {5000 - ERRORS_PER_MINUTE:,} more errors like these were not written\n",
            "hetero: asyncio: one more\n",
        ]

    def test_a_minute_of_errors_is_small_whatever_they_say(self) -> None:
        written: list[str] = []
        logger = self.logger(written.append, lambda: 0.0)
        for _ in range(100):
            logger.error("x" * 10**6)
        assert sum(map(len, written)) < 200_000

    def test_what_moves_the_cursor_is_shown_as_escapes(self) -> None:
        written: list[str] = []
        self.logger(written.append, lambda: 0.0).error("a\x1b[2Jb")
        assert written == ["hetero: asyncio: a\\x1b[2Jb\n"]

    def test_information_is_not_written(self) -> None:
        written: list[str] = []
        self.logger(written.append, lambda: 0.0).info("connected")
        assert written == []
