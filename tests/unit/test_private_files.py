"""Other users of a host neither read private files, nor have this program write, chmod or delete what they choose."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.private_files import (
    delete_path,
    is_own_folder,
    make_private_folder,
    open_for_writing,
    write_private,
)

FIX = "name another folder"
ANOTHER_USER = 65534


@contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture
def of_another_user(tmp_path: Path) -> Path:
    """A folder of another user, which anybody may write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, ANOTHER_USER, ANOTHER_USER)
    return folder


class TestFolder:
    def test_it_is_private_whatever_the_umask(self, tmp_path: Path) -> None:
        with umask(0):
            make_private_folder(tmp_path / "a" / "b", fix=FIX)
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700

    def test_an_open_one_of_this_user_becomes_private(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o755)
        make_private_folder(tmp_path / "open", fix=FIX)
        assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700

    def test_that_of_another_user_is_refused_and_left_as_it_is(self, of_another_user: Path) -> None:
        assert not is_own_folder(of_another_user)
        with pytest.raises(ConfigError, match=f"theirs: it is a link, or belongs to another user; {FIX}"):
            make_private_folder(of_another_user, fix=FIX)
        assert of_another_user.stat().st_mode & 0o777 == 0o777

    def test_a_link_is_refused_and_what_it_leads_to_keeps_its_mode(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there").chmod(0o755)
        (tmp_path / "here").symlink_to(tmp_path / "there")
        assert not is_own_folder(tmp_path / "here")
        with pytest.raises(ConfigError, match="here: it is a link"):
            make_private_folder(tmp_path / "here", fix=FIX)
        assert (tmp_path / "there").stat().st_mode & 0o777 == 0o755

    def test_one_put_there_between_the_look_and_the_open_is_refused(
        self, of_another_user: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hetero.private_files.is_own_folder", lambda path: True)
        with pytest.raises(ConfigError, match="belongs to another user"):
            make_private_folder(of_another_user, fix=FIX)

    def test_a_file_in_its_place_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=f"file: the folder cannot be made: File exists; {FIX}"):
            make_private_folder(tmp_path / "file", fix=FIX)

    def test_a_file_system_that_keeps_its_modes_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o755)

        def refused(*_: Any) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "fchmod", refused)
        with pytest.raises(ConfigError, match=r"lets others read what is in it \(mode 0700 is refused\); name"):
            make_private_folder(tmp_path / "open", fix=FIX)


class TestFile:
    def test_a_private_one_is_so_from_the_first_byte_and_follows_no_link(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "token").symlink_to(tmp_path / "mine")
        with umask(0):
            write_private(tmp_path / "token", "secret")
        assert (tmp_path / "mine").read_text() == "mine"
        assert (tmp_path / "token").lstat().st_mode & 0o7777 == 0o600

    @pytest.mark.parametrize("mode", ["a", "a+", "w"])
    def test_no_link_is_written_through(self, mode: str, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "log").symlink_to(tmp_path / "mine")
        with pytest.raises(OSError, match="log"):
            open_for_writing(tmp_path / "log", mode)
        (tmp_path / "dangling").symlink_to(tmp_path / "new")
        with pytest.raises(OSError, match="dangling"):
            open_for_writing(tmp_path / "dangling", mode)
        assert (tmp_path / "mine").read_text() == "mine"
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("mode", ["a", "a+", "w"])
    def test_a_pipe_is_not_waited_for(self, mode: str, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match=r"pipe|No such device"):
            open_for_writing(tmp_path / "pipe", mode)

    def test_a_new_file_and_one_that_is_there(self, tmp_path: Path) -> None:
        for expected in (b"one\n", b"one\none\n"):
            with open_for_writing(tmp_path / "log", "a+") as file:
                file.write(b"one\n")
            assert (tmp_path / "log").read_bytes() == expected
        with open_for_writing(tmp_path / "log", "w") as file:
            file.write(b"two")
        assert (tmp_path / "log").read_bytes() == b"two"


def test_a_deleted_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").touch()
    (tmp_path / "ours").mkdir()
    for link in (tmp_path / "link", tmp_path / "ours" / "link"):
        link.symlink_to(tmp_path / "theirs")
    os.mkfifo(tmp_path / "ours" / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "ours" / "s"))
        for name in ("link", "ours", "nothing"):
            delete_path(tmp_path / name)
    assert [each.name for each in tmp_path.rglob("*")] == ["theirs", "thesis.tex"]
