"""What an agent shows of the files that its ranks print into."""

import shutil
from pathlib import Path

import pytest

from hetero.elastic.rank_processes import RankOutput


def test_whole_lines_are_shown_and_the_rest_at_the_end(tmp_path: Path) -> None:
    shown: list[str] = []
    output = RankOutput(shown.append)
    path = tmp_path / "epoch/rank.log"
    path.parent.mkdir()
    path.write_text("of an earlier run\n")
    output.follow(path, prefix="[rank 0] ")
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        output.show_new()
        assert shown == ["[rank 0] one"]
        file.write("o")
    output.show_new(last=True)
    assert shown == ["[rank 0] one", "[rank 0] two"]


def test_a_very_long_line_does_not_hold_up_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a progress bar that is drawn over itself."""
    monkeypatch.setattr("hetero.elastic.rank_processes._READ_AT_ONCE", 4)
    shown: list[str] = []
    output = RankOutput(shown.append)
    output.follow(tmp_path / "rank.log", prefix="")
    (tmp_path / "rank.log").write_text("abcdefg\nhi\n")
    for _ in range(3):
        output.show_new()
    assert shown == ["abcd", "efg", "hi"]


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Anybody may put one into a shared folder of logs."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "rank.log").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"rank\.log is a link, which is not followed"):
        RankOutput([].append).follow(tmp_path / "rank.log", prefix="")
    assert (tmp_path / "mine").read_text() == "mine"


def test_lines_are_shown_also_of_a_file_that_was_deleted(tmp_path: Path) -> None:
    shown: list[str] = []
    output = RankOutput(shown.append)
    path = tmp_path / "logs/epoch/rank.log"
    output.follow(path, prefix="")
    with path.open("a") as file:
        shutil.rmtree(tmp_path / "logs")
        file.write("one\n")
    output.show_new()
    assert shown == ["one"]


def test_a_file_that_cannot_be_read_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    output = RankOutput(shown.append)
    output.follow(tmp_path / "rank.log", prefix="")
    (tmp_path / "rank.log").write_text("one\n")

    def stale(*_: int) -> bytes:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.pread", stale)
        output.show_new()
    output.show_new()
    assert shown == ["one"]
