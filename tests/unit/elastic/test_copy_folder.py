"""Whose a folder of copies is, and what of it counts."""

import asyncio
import errno
import fcntl
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from hetero.elastic.copy_folder import (
    MemoryOfEpochs,
    copy_path,
    epochs_in,
    find_copy,
    inventory,
    read_placement,
    remove_copy,
    remove_epochs_before,
    slot_folder,
    write_placement,
)
from hetero.elastic.folder_claim import claimed_folder
from hetero.elastic.rank_reports import RankReports
from hetero.elastic.records import Ancestry, HeldStep, NodeMemory, RestorePoint
from hetero.elastic.store_connection import fix_of
from hetero.errors import CheckpointError, ConfigError
from tests.unit.elastic.test_copy_server import UNIT, fill


class TestClaim:
    def test_copies_of_the_same_job_stay_and_those_of_another_go(self, tmp_path: Path) -> None:
        folder = tmp_path / "copies"
        with claimed_folder(folder, job="one"):
            assert folder.stat().st_mode & 0o777 == 0o700
            fill(folder)
        with claimed_folder(folder, job="one"):
            assert epochs_in(folder) == [4]
        with claimed_folder(folder, job="two"):
            assert epochs_in(folder) == []
        with claimed_folder(folder, job="one"):
            assert epochs_in(folder) == []

    def test_two_agents_do_not_share_one(self, tmp_path: Path) -> None:
        with (
            claimed_folder(tmp_path, job="one"),
            pytest.raises(
                ConfigError, match=r"another agent works with it; name another folder \(--copies\), or end that agent"
            ),
            claimed_folder(tmp_path, job="one"),
        ):
            pass

    def test_files_of_somebody_else_are_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()
        with pytest.raises(ConfigError, match="files that are no copies of a run"), claimed_folder(tmp_path, job="one"):
            pass
        assert (tmp_path / "thesis.tex").exists()

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "here").symlink_to(tmp_path / "there")
        with pytest.raises(ConfigError, match="it is a link"), claimed_folder(tmp_path / "here", job="one"):
            pass

    def test_no_shared_memory(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with (
            pytest.raises(ConfigError, match="the folder cannot be made: Not a directory"),
            claimed_folder(tmp_path / "file" / "x", job="one"),
        ):
            pass

    def test_no_room_is_one_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As where another job has left a full /dev/shm."""

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("hetero.elastic.folder_claim.FileIO", type("Full", (FileIO,), {"write": full}))
        message = r"cannot be taken over: No space left on device; name another folder \(--copies\), or make room there"
        with pytest.raises(ConfigError, match=message), claimed_folder(tmp_path, job="one"):
            pass


def test_a_folder_that_vanishes_has_no_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a login manager clears shared memory; what earlier epochs have left is then gone, too."""
    fill(tmp_path, epoch=3)

    def iterdir(self: Path) -> list[Path]:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert epochs_in(tmp_path) == []
    remove_epochs_before(tmp_path, 4)
    assert inventory(tmp_path, node="a").steps == ()


def test_what_is_damaged_or_being_written_is_no_copy(tmp_path: Path) -> None:
    fill(tmp_path, step=7, slot=1)
    fill(tmp_path, step=6, slot=0)
    assert find_copy(tmp_path, epoch=4, step=8, unit=UNIT) is None
    copy_path(slot_folder(tmp_path, 4, 0), UNIT).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        find_copy(tmp_path, epoch=4, step=6, unit=UNIT)
    assert inventory(tmp_path, node="a").steps == (HeldStep(epoch=4, step=7, units=frozenset({UNIT})),)
    remove_copy(tmp_path, epoch=4, step=7, unit=UNIT)
    assert inventory(tmp_path, node="a").steps == ()
    assert inventory(tmp_path, node="a").units_of_epoch == {4: frozenset({UNIT})}


FIRST = Ancestry(ids={1: "a"}, lineage={1: RestorePoint(epoch=0, step=0)})
SECOND = Ancestry(ids={1: "a", 2: "b"}, lineage={1: RestorePoint(epoch=0, step=0), 2: RestorePoint(epoch=1, step=4)})


def test_a_node_remembers_the_newest_epoch_and_a_commit(tmp_path: Path) -> None:
    memory = MemoryOfEpochs(tmp_path)
    memory.see(SECOND, takes_part=True)
    MemoryOfEpochs(tmp_path).see(FIRST, takes_part=True)
    assert inventory(tmp_path, node="a").memory == NodeMemory(newest=SECOND)
    memory.note_commit()
    memory.see(Ancestry(ids={1: "x"}), takes_part=False)
    assert inventory(tmp_path, node="a").memory == NodeMemory(newest=SECOND, has_committed=True)
    (tmp_path / "newest_epoch.json").write_text("{")
    assert inventory(tmp_path, node="a").memory == NodeMemory()
    with claimed_folder(tmp_path / "other", job="one"):
        MemoryOfEpochs(tmp_path / "other").see(FIRST, takes_part=False)
    with claimed_folder(tmp_path / "other", job="two"):
        assert inventory(tmp_path / "other", node="a").memory == NodeMemory()


def test_what_cannot_be_noted_is_noted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryOfEpochs(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        memory.see(FIRST, takes_part=True)
    assert inventory(tmp_path, node="a").memory == NodeMemory()
    memory.see(FIRST, takes_part=True)
    assert inventory(tmp_path, node="a").memory == NodeMemory(newest=FIRST)


def test_an_epoch_does_not_take_over_copies_of_another_with_its_number(tmp_path: Path) -> None:
    fill(tmp_path)
    placement = read_placement(tmp_path, 4)
    assert placement is not None
    assert inventory(tmp_path, node="a").id_of_epoch == {4: "id4"}
    write_placement(tmp_path, 4, placement, epoch_id="id4")
    assert len(inventory(tmp_path, node="a").steps) == 1
    write_placement(tmp_path, 4, placement, epoch_id="another")
    assert inventory(tmp_path, node="a").steps == ()
    assert inventory(tmp_path, node="a").id_of_epoch == {4: "another"}


def test_earlier_epochs_go(tmp_path: Path) -> None:
    for epoch in (3, 4, 5):
        fill(tmp_path, epoch=epoch)
    remove_epochs_before(tmp_path, 5)
    assert epochs_in(tmp_path) == [5]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_locked_is_refused_with_one_that_can(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without its flock option, NFS without a lock daemon, and FUSE."""

    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    message = rf"it cannot be locked: {os.strerror(number)}; name another folder \(--copies\), on a local file system"
    with pytest.raises(ConfigError, match=message), claimed_folder(tmp_path / "copies", job="job"):
        pass


def test_a_folder_that_stays_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount may give all files one mode, and refuse another."""
    (tmp_path / "copies").mkdir(mode=0o755)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refused)
    message = r"its file system lets others read what is in it \(mode 0700 is refused\); name another folder"
    with pytest.raises(ConfigError, match=message), claimed_folder(tmp_path / "copies", job="job"):
        pass
    monkeypatch.undo()
    (tmp_path / "copies").chmod(0o700)
    monkeypatch.setattr(os, "fchmod", refused)
    with claimed_folder(tmp_path / "copies", job="job"):
        assert (tmp_path / "copies" / "job.json").exists()


@pytest.mark.parametrize("folder", ["deep" * 30, "none"])
def test_a_folder_without_room_for_a_socket_is_named(folder: str, tmp_path: Path) -> None:
    """A path of more than 108 bytes is none of a socket, and a folder that is not there has none."""
    path = tmp_path / folder / "reports.sock"
    with pytest.raises(
        ConfigError, match=r"reports\.sock: no socket can be there: .*; name another folder \(--copies\)"
    ):
        asyncio.run(RankReports(lambda report: None).listen(path))


def test_a_store_in_a_folder_without_hard_links_is_told_what_it_needs() -> None:
    """As obstore 0.12.1 words it."""
    error = GenericError("Generic LocalFileSystem error: Unable to rename file: Operation not permitted (os error 1)")
    assert fix_of(error).startswith(
        "a put that may only create makes a hard link, which the file system of this folder"
    )
