"""What other users may have written is refused by name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero import folder_owners
from hetero.errors import ConfigError
from hetero.folder_owners import check_own

STRANGER = 54321


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Give a path to another user: really if this user may, else by being another user than the one who made it."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
            monkeypatch.setattr(folder_owners, "_owner_of_new_file", lambda folder: STRANGER)

    return give


def test_own_files_and_what_is_not_there_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o644)
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "file", tmp_path / "dangling", tmp_path / "nowhere"):
        check_own(path, instead="name another")


def test_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="inside: its owner cannot be told: Not a directory; name another"):
        check_own(tmp_path / "file" / "inside", instead="name another")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_belongs_to_another_user(kind: str, tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    path = tmp_path / "given"
    path.mkdir() if kind == "folder" else path.touch()
    give_away(path)
    with pytest.raises(ConfigError, match=r"given: belongs to user .*\d+.*; name another"):
        check_own(path, instead="name another")


def test_a_link_counts_with_what_it_leads_to(tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    check_own(tmp_path / "link", instead="name another")
    (tmp_path / "target").chmod(0o666)
    with pytest.raises(ConfigError, match="link: every user may write it"):
        check_own(tmp_path / "link", instead="name another")
    (tmp_path / "target").chmod(0o600)
    give_away(tmp_path / "target")
    with pytest.raises(ConfigError, match="link: belongs to user"):
        check_own(tmp_path / "link", instead="name another")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link away")
def test_a_link_of_another_user(tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    (tmp_path / "target").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    give_away(tmp_path / "link")
    with pytest.raises(ConfigError, match="link: belongs to user"):
        check_own(tmp_path / "link", instead="name another")


@pytest.mark.parametrize(
    ("mode", "who"), [(0o775, "its group"), (0o777, "every user"), (0o1777, "every user"), (0o702, "every user")]
)
def test_what_others_may_write(mode: int, who: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(
        ConfigError,
        match=rf"cache: {who} may write it \(mode {mode:04o}\); remove that with chmod -R go-w .*name another",
    ):
        check_own(tmp_path / "cache", instead="name another")


def test_a_file_system_that_shows_one_owner_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an NFS server shows root's files as nobody's, and what this user makes there too."""
    (tmp_path / "file").touch(mode=0o644)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    for path in (tmp_path, tmp_path / "file"):
        check_own(path, instead="name another")
