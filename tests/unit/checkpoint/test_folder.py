"""What counts as a checkpoint, and which are deleted."""

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.checkpoint import folder as folder_module
from hetero.checkpoint.folder import (
    find_checkpoint,
    fsync_in_parts,
    keep_newest,
    latest_step,
    prepare,
    published_steps,
    read_state,
)
from hetero.errors import CheckpointError
from tests.helpers.checkpoints import make_slices, plan_of, save_alone, state_of


def publish(folder: Path, *steps: int) -> None:
    for step in steps:
        save_alone(folder, [make_slices(step=step, kinds=["weights"])], state_of(plan_of(), step=step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_published_steps_are_found_in_order_of_number(tmp_path: Path) -> None:
    publish(tmp_path, 30, 4, 100_000_000)
    (tmp_path / ".step_00000200.partial").mkdir()
    (tmp_path / "step_00000300").touch()
    (tmp_path / "notes").mkdir()
    assert published_steps(tmp_path) == [4, 30, 100_000_000]
    assert latest_step(tmp_path) == 100_000_000
    assert read_state(find_checkpoint(tmp_path, 30)).step == 30


def test_nothing_there(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path / "missing", None)
    publish(tmp_path, 4)
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are 4"):
        find_checkpoint(tmp_path, 5)


def test_the_newest_are_kept_and_the_one_that_the_run_started_from(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3, 4, 5)
    keep_newest(tmp_path, 2, protected_step=1)
    assert names(tmp_path) == ["step_00000001", "step_00000004", "step_00000005"]
    keep_newest(tmp_path, 1, protected_step=None)
    assert names(tmp_path) == ["step_00000005"]


def test_what_killed_runs_left_is_deleted(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    for left in (".step_00000002.deleted", ".step_00000004.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "rank_00000.safetensors").touch()
    (tmp_path / ".mine").mkdir()
    prepare(tmp_path, start_step=3)
    assert names(tmp_path) == [".mine", "step_00000003"]


def test_a_run_does_not_mix_its_checkpoints_with_later_ones(tmp_path: Path) -> None:
    publish(tmp_path, 3, 7)
    with pytest.raises(CheckpointError, match="step 7, later than step 3"):
        prepare(tmp_path, start_step=3)
    prepare(tmp_path, start_step=7)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        prepare(tmp_path / "file" / "folder", start_step=0)


@pytest.fixture
def large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two parts and a half."""
    monkeypatch.setattr(folder_module, "_PART_BYTES", 1000)
    (path := tmp_path / "large").write_bytes(bytes(2500))
    return path


def test_a_large_file_says_how_much_of_it_is_on_the_disk(large_file: Path) -> None:
    parts: list[None] = []
    fsync_in_parts(large_file, lambda: parts.append(None))
    assert len(parts) == 3


@pytest.mark.parametrize(("number", "is_error"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.ENOSYS, False)])
def test_what_the_disk_says_of_a_part_is_heard(
    number: int, is_error: bool, large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says it once. A file system that knows no parts has ``fsync``."""
    library = SimpleNamespace(sync_file_range=lambda *_: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    monkeypatch.setattr(ctypes, "get_errno", lambda: number)
    if is_error:
        with pytest.raises(OSError, match=rf"\[Errno {number}\]"):
            fsync_in_parts(large_file, lambda: None)
    else:
        fsync_in_parts(large_file, lambda: None)
