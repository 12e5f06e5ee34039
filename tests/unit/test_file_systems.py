"""What is done where a file system refuses links, modes, or to copy by itself; and what stays an error."""

import errno
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from hetero.file_systems import copy_whole, let_readers_of_folder_read, link_or_copy, was_linked
from tests.helpers.refusing_file_system import refuse_links

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(CONTENT)
    return tmp_path / "source"


def test_a_file_is_linked_where_that_is_possible(source: Path, tmp_path: Path) -> None:
    link_or_copy(source, tmp_path / "target")
    assert (tmp_path / "target").samefile(source)


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK], ids=errno.errorcode.get
)
def test_a_file_is_copied_where_links_are_refused(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, number)
    link_or_copy(source, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT
    assert not (tmp_path / "target").samefile(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EEXIST, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_another_error_of_a_link_stays_one(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch, number)
    with pytest.raises(OSError, match=rf"\[Errno {number}\]"):
        was_linked(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("copied_bytes", [0, 1000, len(CONTENT)])
def test_what_the_file_system_does_not_copy_by_itself_is_read_and_written(
    copied_bytes: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([copied_bytes] if copied_bytes else [])

    def copy_file_range(source: int, target: int, count: int, *_: Any) -> int:
        if (num_bytes := next(calls, None)) is None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return os.write(target, os.read(source, num_bytes))

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    with FileIO(source) as file:
        copy_whole(file, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT


def test_a_copy_for_which_there_is_no_room_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    monkeypatch.setattr("hetero.file_systems.shutil.copyfileobj", full)
    refuse_links(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        link_or_copy(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_file_whose_name_is_gone_is_copied_as_it_was(source: Path, tmp_path: Path) -> None:
    with FileIO(source) as file:
        source.unlink()
        source.write_bytes(b"another")
        copy_whole(file, tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == CONTENT


def test_a_mount_that_has_its_own_modes_is_no_error(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.chmod(0o600)
    source.parent.chmod(0o755)
    let_readers_of_folder_read(source)
    assert source.stat().st_mode & 0o777 == 0o644

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "chmod", refused)
    let_readers_of_folder_read(source)
    with pytest.raises(FileNotFoundError):
        let_readers_of_folder_read(source.parent / "none" / "file")
