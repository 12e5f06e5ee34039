"""What counts as a checkpoint, and which are deleted."""

import ctypes
import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    whole_state,
)
from hetero.errors import CheckpointError, ConfigError
from tests.helpers.checkpoints import make_slices, plan_of, save_alone, state_of
from tests.helpers.refusing_file_system import refuse_renames_of_folders


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


def test_a_checkpoint_that_is_a_link_loses_its_name_alone(tmp_path: Path) -> None:
    """As one that was moved to an archive. What the link led to was deleted."""
    publish(tmp_path / "archive", 1, 2)
    publish(tmp_path / "run", 3)
    for step in (1, 2):
        (tmp_path / "run" / f"step_{step:08d}").symlink_to(tmp_path / "archive" / f"step_{step:08d}")
    (tmp_path / "run" / ".step_00000007.partial").symlink_to(tmp_path / "archive")
    keep_newest(tmp_path / "run", 2)
    assert published_steps(tmp_path / "run") == [2, 3]
    prepare(tmp_path / "run", start_step=3)
    keep_newest(tmp_path / "run", 1)
    assert names(tmp_path / "run") == ["step_00000003"]
    for step in (1, 2):
        assert whole_state(tmp_path / "archive" / f"step_{step:08d}") is not None


def test_a_folder_of_a_step_that_no_run_comes_to_is_none(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    (tmp_path / f"step_{'9' * 30}").mkdir()
    (tmp_path / f"step_{'9' * 30}" / "notes").touch()
    assert latest_step(tmp_path) == 4


def test_the_newest_are_kept_and_the_one_that_the_run_started_from(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3, 4, 5)
    keep_newest(tmp_path, 2, protected_steps=(1,))
    assert names(tmp_path) == ["step_00000001", "step_00000004", "step_00000005"]
    keep_newest(tmp_path, 1)
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
    with pytest.raises(ConfigError, match="step 7, later than step 3"):
        prepare(tmp_path, start_step=3)
    prepare(tmp_path, start_step=7)


def test_later_checkpoints_are_a_runs_own_if_they_are_of_its_samples(tmp_path: Path) -> None:
    publish(tmp_path, 3, 7)
    own = state_of(plan_of(), step=3)
    prepare(tmp_path, start_step=3, own=own)
    with pytest.raises(ConfigError, match="step 7, later than step 3"):
        prepare(tmp_path, start_step=3, own=dataclasses.replace(own, seed=own.seed + 1))
    (tmp_path / "step_00000007" / "state.json").write_text("torn")
    prepare(tmp_path, start_step=3, own=own)


def test_a_checkpoint_is_whole_with_all_of_its_files_alone(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    checkpoint = find_checkpoint(tmp_path, 3)
    assert whole_state(checkpoint) == state_of(plan_of(), step=3)
    shard = next(checkpoint.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert whole_state(checkpoint) is None
    shard.unlink()
    assert whole_state(checkpoint) is None
    shard.write_bytes(content)
    assert whole_state(checkpoint) is not None
    (checkpoint / "SHA256SUMS").unlink()
    assert whole_state(checkpoint) is None
    assert published_steps(tmp_path) == [3], "older ones than these rules have none"


@pytest.mark.parametrize("renames", [True, False])
def test_a_checkpoint_takes_the_place_of_another_one_of_its_step(
    renames: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 3)
    (tmp_path / "step_00000003" / "manifest.json").write_text("torn")
    if not renames:
        refuse_renames_of_folders(monkeypatch)
    publish(tmp_path, 3)
    assert whole_state(find_checkpoint(tmp_path, 3)) is not None
    assert names(tmp_path) == ["step_00000003"]


def test_a_checkpoint_that_is_replaced_is_deleted_once_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed while it deletes has the new one; what cannot be deleted goes with the next run."""
    publish(tmp_path, 3)

    def refuse(path: Path, **_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as failing:
        failing.setattr(Path, "unlink", refuse)
        publish(tmp_path, 3)
    assert whole_state(find_checkpoint(tmp_path, 3)) is not None
    assert names(tmp_path) == [".step_00000003.deleted", "step_00000003"]
    prepare(tmp_path, start_step=3)
    assert names(tmp_path) == ["step_00000003"]


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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_folders_that_cannot_be_renamed_are_published_and_deleted_all_the_same(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "whole", 1)
    refuse_renames_of_folders(monkeypatch, number)
    publish(tmp_path / "run", 1, 2, 3)
    assert names(tmp_path / "run") == ["step_00000001", "step_00000002", "step_00000003"]
    assert names(tmp_path / "run" / "step_00000001") == names(tmp_path / "whole" / "step_00000001")
    assert read_state(find_checkpoint(tmp_path / "run", None)).step == 3
    counting = []
    keep_newest(tmp_path / "run", 1, advance=lambda: counting.append(published_steps(tmp_path / "run")))
    assert counting[0] == [2, 3], "after its first file the step counts no more"
    assert all(1 not in steps for steps in counting)
    assert counting[-1] == [3]
    assert names(tmp_path / "run") == ["step_00000003"]


@pytest.mark.parametrize("moved", range(4))
def test_one_that_is_killed_among_its_renames_never_counts_and_is_written_again(
    moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard, two index files and the checksums: before the last of them the step is none."""
    refuse_renames_of_folders(monkeypatch)
    publish(tmp_path, 1)
    rename, left = Path.rename, [moved]

    def killed(self: Path, target: Any) -> Path:
        if not self.is_dir():
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, 2)
    assert published_steps(tmp_path) == [1]
    prepare(tmp_path, start_step=1)
    publish(tmp_path, 2)
    assert published_steps(tmp_path) == [1, 2]
    assert names(tmp_path / "step_00000002") == names(tmp_path / "step_00000001")


def test_a_folder_that_cannot_be_synchronised_is_one_of_a_mount_that_has_no_need_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFS says EINVAL. A file that is not on the disk stays an error."""
    fsync = os.fsync

    def refused(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir() or refuses_files[0]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    refuses_files = [False]
    monkeypatch.setattr(os, "fsync", refused)
    publish(tmp_path, 1)
    assert published_steps(tmp_path) == [1]
    refuses_files[0] = True
    with pytest.raises((CheckpointError, OSError), match="Invalid argument"):
        publish(tmp_path, 2)
    assert published_steps(tmp_path) == [1]
