"""The event log of a node, on files that take all, a part or nothing of it."""

import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from hetero.elastic.events import EventLog, read_events
from hetero.errors import ConfigError


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: a write up to there is cut short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs/a.events.jsonl"


@pytest.fixture
def log(path: Path, shown: list[str]) -> Iterator[EventLog]:
    log = EventLog(path, node="a", show=shown.append)
    yield log
    log.close()


def kinds(path: Path) -> list[str]:
    return [event.kind for event in read_events(path)]


def test_a_file_that_is_full_costs_events_and_no_line_of_another(log: EventLog, path: Path, shown: list[str]) -> None:
    log.note("agent_started")
    with largest_file(path.stat().st_size + 20):
        log.note("warm")
        log.note("node_joined")
        assert path.read_bytes()[-1:] != b"\n", "a part of a line was written"
        assert kinds(path) == ["agent_started"]
        (said,) = shown
        assert f"{path}: File too large: events are not logged until it can be written again" in said
    log.note("leads", epoch=3)
    assert kinds(path) == ["agent_started", "events_lost", "leads"]
    lost = read_events(path)[1]
    assert (lost.detail, lost.epoch) == ("2 events could not be written: File too large", 3)
    assert shown[1:] == [f"hetero: {path}: events are logged again, 2 are missing"]
    with largest_file(path.stat().st_size):
        log.note("warm")
    assert len(shown) == 3, "trouble that comes again is said again"


def test_a_folder_that_is_deleted_comes_back(log: EventLog, path: Path, shown: list[str]) -> None:
    log.note("agent_started")
    shutil.rmtree(path.parent)
    log.note("leads")
    assert kinds(path) == ["leads"]
    assert not shown
    shutil.rmtree(path.parent)
    path.parent.touch()
    log.note("plan")
    log.note("forked")
    path.parent.unlink()
    log.note("joined")
    assert kinds(path) == ["events_lost", "joined"]
    assert len(shown) == 2


def test_a_line_of_an_agent_that_was_killed_gives_way(path: Path, shown: list[str]) -> None:
    first = EventLog(path, node="a", show=shown.append)
    first.note("agent_started", detail="x" * 10_000)
    first.close()
    with path.open("ab") as file:
        file.write(path.read_bytes()[:9_000])
    second = EventLog(path, node="a", show=shown.append)
    second.note("agent_started")
    second.close()
    assert kinds(path) == ["agent_started", "agent_started"]


def test_a_disk_that_is_full_at_the_start_is_said(
    path: Path, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hetero.elastic.events.open_for_writing", lambda path, mode: FileIO("/dev/full", mode))
        log = EventLog(path, node="a", show=shown.append)
        log.note("agent_started")
    assert ["No space left on device" in each for each in shown] == [True]
    log.note("warm")
    log.close()
    assert kinds(path) == ["events_lost", "warm"]


def test_a_link_that_another_user_has_put_there_is_not_written_through(path: Path, shown: list[str]) -> None:
    """A last line that is not whole is cut off at the start, of the user's own file as well."""
    path.parent.mkdir()
    mine = path.with_name("mine")
    mine.write_text("half a line")
    path.symlink_to(mine)
    with pytest.raises(ConfigError, match=rf"{path.name} is a link, which is not followed; name another folder"):
        EventLog(path, node="a", show=shown.append)
    assert mine.read_text() == "half a line"


def test_a_place_that_can_hold_no_log_is_refused(tmp_path: Path, shown: list[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"events cannot be logged there: Not a directory; .*--logs"):
        EventLog(tmp_path / "file/logs/a.events.jsonl", node="a", show=shown.append)


def test_a_server_that_has_lost_the_open_file(
    log: EventLog, path: Path, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of NFS: ESTALE, until the file is opened again."""
    fstat = os.fstat

    def stale(descriptor: int) -> os.stat_result:
        if descriptor == log._file.fileno():  # type: ignore[union-attr]  # opened
            raise OSError(116, os.strerror(116))
        return fstat(descriptor)

    log.note("agent_started")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        log.note("warm")
    log.note("leads")
    assert kinds(path) == ["agent_started", "events_lost", "leads"]
    assert "Stale file handle" in shown[0]
