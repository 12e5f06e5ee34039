"""What counts as a checkpoint, and which are deleted."""

from pathlib import Path

import pytest

from hetero.checkpoint.folder import find_checkpoint, keep_newest, latest_step, prepare, published_steps, read_state
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
