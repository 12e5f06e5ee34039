"""Which folder a node's copies go to on a host that others share, what may lie in it, and what of it is deleted."""

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.elastic.copy_folder import epochs_in, find_copy, inventory, remove_epochs_before, slot_folder, used_bytes
from hetero.elastic.folder_claim import choose_folder, claimed_folder, delete_folder, owner_of_copies
from hetero.elastic.held_uploads import holds_any, release
from hetero.elastic.records import NodeMemory
from hetero.elastic.slot_files import reused_file
from hetero.errors import ConfigError
from tests.unit.elastic.test_copy_server import CONTENT, UNIT, fill

JOB, NODE, OWNER = "run", "a", "run 0123456789abcdef"


class TestChoice:
    @pytest.fixture
    def said(self) -> list[str]:
        return []

    @pytest.fixture
    def choose(self, tmp_path: Path, said: list[str]) -> Callable[[], Path]:
        return lambda: choose_folder(JOB, NODE, say=said.append, parent=tmp_path)

    def taken(self, tmp_path: Path) -> Path:
        """Another user has made the name first: here a link, as any user can make one in a test."""
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        (tmp_path / "hetero-run-a").symlink_to(theirs)
        return theirs

    def test_the_usual_one(self, tmp_path: Path, choose: Callable[[], Path], said: list[str]) -> None:
        assert choose() == tmp_path / "hetero-run-a"
        assert not (tmp_path / "hetero-run-a").exists()
        with claimed_folder(choose(), job=OWNER):
            assert choose() == tmp_path / "hetero-run-a"
        assert said == []

    def test_another_one_where_the_name_is_taken(
        self, tmp_path: Path, choose: Callable[[], Path], said: list[str]
    ) -> None:
        theirs = self.taken(tmp_path)
        folder = choose()
        assert re.fullmatch(r"hetero-run-a~[0-9a-f]{8}", folder.name)
        assert said == [f"hetero: {tmp_path}/hetero-run-a is no folder of this user: copies of node a go to {folder}"]
        assert choose() != folder, "nothing was made yet, and nobody guesses the name"
        with claimed_folder(folder, job=OWNER):
            fill(folder)
        assert list(theirs.iterdir()) == []

    def test_it_is_found_again_also_if_the_usual_one_is_free_by_then(
        self, tmp_path: Path, choose: Callable[[], Path], said: list[str]
    ) -> None:
        self.taken(tmp_path)
        folder = choose()
        with claimed_folder(folder, job=OWNER):
            fill(folder)
        assert choose() == folder
        (tmp_path / "hetero-run-a").unlink()
        assert choose() == folder
        assert said[-1] == f"hetero: copies of node a are in {folder}, as those of its last agent"
        assert epochs_in(folder) == [4]

    def test_what_another_user_or_job_has_under_such_a_name_is_not_taken(
        self, tmp_path: Path, choose: Callable[[], Path]
    ) -> None:
        theirs = self.taken(tmp_path)
        (tmp_path / "hetero-run-a~00000000").symlink_to(theirs)
        with claimed_folder(tmp_path / "hetero-run-a~00000001", job="other 0123456789abcdef"):
            fill(tmp_path / "hetero-run-a~00000001")
        assert choose().name not in {each.name for each in tmp_path.iterdir()}


MAKE: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent.parent / "mine"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "file": Path.touch,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of copies of this job; beside it ``mine``, a file and folder that no agent may touch."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("thesis")
    (tmp_path / "copies").mkdir()
    with claimed_folder(tmp_path / "copies", job=OWNER):
        fill(tmp_path / "copies")
    # Paths of sockets are short.
    monkeypatch.chdir(tmp_path)
    return Path("copies")


WRONG = [
    *((name, kind) for name in ("job.json", "newest_epoch.json", "problem.json") for kind in MAKE if kind != "file"),
    *((name, kind) for name in ("reports.sock",) for kind in MAKE if kind != "socket"),
    *((name, kind) for name in ("epoch_00000009", "epoch_00000004/slot_0") for kind in MAKE if kind != "folder"),
    ("assignment_00000004.json", "pipe"),
    ("epoch_00000004/upload", "link"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("name", "kind"), WRONG, ids=lambda value: value.replace("/", "_"))
def test_what_is_not_what_agents_make_is_named_at_once(name: str, kind: str, folder: Path) -> None:
    """A pipe was waited for without end; what a link led to was written, or deleted."""
    path = folder / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    MAKE[kind](path)
    for job in (OWNER, "another"):
        with (
            pytest.raises(ConfigError, match=rf"{name}: it is not a \w+, as agents make under this name; move it away"),
            claimed_folder(folder, job=job),
        ):
            pass
    owner_of_copies(folder)
    inventory(folder, node=NODE)
    remove_epochs_before(folder, 12)
    delete_folder(folder)
    assert Path("mine/thesis.tex").read_text() == "thesis"


ODD_NAMES = ("epoch_7", "epoch_0000000a", "Epoch_00000001", f"epoch_{'9' * 30}", "epoch_00000004.old", "thesis.tex")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_names_that_are_none_of_ours_are_neither_read_nor_deleted(kind: str, folder: Path) -> None:
    for name in ODD_NAMES:
        MAKE[kind](folder / name)
    for job in (OWNER, "another"):
        with claimed_folder(folder, job=job):
            assert epochs_in(folder) == ([4] if job == OWNER else [])
            assert used_bytes(folder, before_epoch=4) == 0
            remove_epochs_before(folder, 4)
    delete_folder(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(ODD_NAMES)
    assert Path("mine/thesis.tex").exists()


def test_a_folder_with_nothing_else_is_gone_after_its_run(folder: Path) -> None:
    (folder / "problem.json").touch()
    (folder / "assignment_00000004.json").touch()
    (folder / ".newest_epoch.json.17.partial").touch()
    MAKE["socket"](folder / "reports.sock")
    delete_folder(folder)
    assert not folder.exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "socket"])
def test_a_description_that_is_no_file_is_no_copy(kind: str, folder: Path) -> None:
    slot = slot_folder(folder, 4, 1)
    path = slot / f"{UNIT}.json"
    path.unlink()
    MAKE[kind](path)
    assert inventory(folder, node=NODE).steps == ()
    path = folder / "epoch_00000004/placement.json"
    path.unlink()
    MAKE[kind](path)
    assert inventory(folder, node=NODE).units_of_epoch == {}


def test_what_cannot_be_read_is_no_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a folder has lost its permissions; root reads all the same."""

    def refuse(self: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "lstat", refuse)
    assert find_copy(folder, epoch=4, step=7, unit=UNIT) is None
    assert inventory(folder, node=NODE).memory == NodeMemory()


def test_numbers_that_no_epoch_has_are_not_gone_on_from(folder: Path) -> None:
    (folder / "newest_epoch.json").write_text(f'{{"newest": {{"ids": {{"{"9" * 30}": "x"}}}}}}')
    assert inventory(folder, node=NODE).memory == NodeMemory()
    (folder / "job.json").write_bytes(b" " * 2**20)
    assert owner_of_copies(folder) == ""


def test_a_held_step_is_released_and_nothing_that_a_link_leads_to(folder: Path) -> None:
    (folder / "epoch_00000004/upload").symlink_to(Path("mine").absolute())
    assert not holds_any(folder, 4)
    release(folder, 4)
    assert Path("mine/thesis.tex").exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "dangling link", "socket"])
def test_a_unit_is_written_into_a_file_alone(kind: str, folder: Path) -> None:
    path = folder / "epoch_00000004/slot_0" / f"{UNIT}.safetensors"
    MAKE[kind](path)
    with pytest.raises(OSError, match="safetensors"), reused_file(path, len(CONTENT)):
        pass
    assert Path("mine/thesis.tex").exists()
