"""Files that a user names: written whole or not at all, and refused before the work whose result goes there."""

import os
import stat
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.output_files import check_can_be_written, make_folder, write_bytes


def refused(path: Path) -> str:
    """The message of the check, which leaves nothing behind; writing is refused too."""
    with pytest.raises(ConfigError) as caught:
        check_can_be_written(path, asked_by="--out")
    with pytest.raises(ConfigError):
        write_bytes(path, b"x")
    said = str(caught.value)
    assert said.startswith(f"--out {path}: ")
    return said.removeprefix(f"--out {path}: ")


def test_what_can_be_written_is_and_nothing_else_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    check_can_be_written(path)
    assert list(tmp_path.iterdir()) == []
    write_bytes(path, b"one")
    check_can_be_written(path)
    assert path.read_bytes() == b"one"
    write_bytes(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The one that the file has at first is longer."""
    for name in ("x" * 250, "x" * 300, "x" * 300 + "/plan.json"):
        assert refused(tmp_path / name).startswith("cannot be written: File name too long; choose another place")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_and_a_file_in_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert refused(tmp_path) == "is a folder; name a file in it"
    assert refused(tmp_path / "file/plan.json") == f"there is no folder {tmp_path}/file; make it first"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_permissions_are_looked_at(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert refused(tmp_path / "plan.json").startswith("may not be written; choose another place")
    with pytest.raises(ConfigError, match="may not be written; name another, or change its permissions"):
        make_folder(tmp_path, asked_by="--out")
    tmp_path.chmod(stat.S_IRWXU)


def test_what_the_system_refuses_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server of files may that trusts no other machine's root: permissions say nothing of it."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert refused(tmp_path / "plan.json").startswith("may not be written; choose another place")


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"before")

    class Full(FileIO):
        def write(self, content: Any) -> int:
            super().write(content[:1])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("hetero.private_files.FileIO", Full)
    with pytest.raises(ConfigError, match=r"plan\.json: cannot be written: No space left on device"):
        write_bytes(path, b"after")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"before"


def test_a_link_in_the_place_of_the_partial_file_is_not_written_through(tmp_path: Path) -> None:
    """Anybody may put one into a shared folder, as the name is known before."""
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    (tmp_path / "plan.json.partial").symlink_to(mine)
    with pytest.raises(
        ConfigError, match=r"plan\.json: cannot be written: plan\.json\.partial is a link, which is not"
    ):
        write_bytes(tmp_path / "plan.json", b"plan")
    assert mine.read_bytes() == b"mine"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    for content in (b"one", b"two"):
        check_can_be_written(link)
        write_bytes(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_devices_and_pipes_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(pipe.read_bytes()))
    reader.start()
    check_can_be_written(pipe)
    write_bytes(pipe, b"content")
    reader.join()
    assert said == [b"content"]
    assert pipe.is_fifo()
    check_can_be_written(Path(os.devnull))
    write_bytes(Path(os.devnull), b"content")
    assert Path(os.devnull).is_char_device()


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a/b", asked_by="--out")
    assert (tmp_path / "a/b").is_dir()
    make_folder(tmp_path / "a/b", asked_by="--out")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"^--logs .*/file/b: cannot be made: Not a directory; name another"):
        make_folder(tmp_path / "file/b", asked_by="--logs")
