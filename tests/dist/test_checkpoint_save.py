"""Ranks save together and in the background; what they publish is whole, or is not there."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetero.checkpoint import writer as writer_module
from hetero.checkpoint.folder import published_steps
from hetero.checkpoint.reader import load_checkpoint
from hetero.checkpoint.writer import CheckpointWriter
from hetero.errors import CheckpointError, ConfigError
from tests.helpers.checkpoints import assert_filled, make_slices, plan_of, save_alone, state_of
from tests.helpers.played_streams import played_cuda
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def create_writer(folder: Path, **options: object) -> CheckpointWriter:
    arguments = {"start_step": 0, "keep_last": None, "asynchronous": True, **options}
    return CheckpointWriter(folder, world=dist.group.WORLD, **arguments)


def save(writer: CheckpointWriter, rank: int, step: int, *, rank_state: dict | None = None) -> None:
    n = dist.get_world_size()
    slices = make_slices(step=step, rank=rank, num_ranks=n, cut=n)
    writer.save(step=step, slices=slices, state=state_of(plan_of(world_size=n), step=step), rank_state=rank_state)


def error_of(call: Callable[[], None]) -> str | None:
    try:
        call()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return None


def assert_holds(folder: Path, step: int) -> None:
    slices = make_slices(step=None, cut=50)
    load_checkpoint(folder, step=step, slices=slices, plan=plan_of(), rank=0)
    assert_filled(slices, step=step)


def save_two_steps(rank: int, folder: Path, asynchronous: bool) -> None:
    writer = create_writer(folder, asynchronous=asynchronous)
    for step in (1, 2):
        save(writer, rank, step, rank_state={"rank": torch.tensor([rank])})
    if asynchronous:
        writer.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("num_saving", [1, 3])
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path, num_saving: int, asynchronous: bool) -> None:
    folder = tmp_path / "made" / "by the writer"
    run_ranks(save_two_steps, num_saving, folder, asynchronous)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]
    for num_loading in (1, 2, 4):
        for rank in range(num_loading):
            slices = make_slices(step=None, rank=rank, num_ranks=num_loading, cut=30)
            load_checkpoint(folder, step=1, slices=slices, plan=plan_of(world_size=num_loading), rank=rank)
            assert_filled(slices, step=1)
    for rank in range(num_saving):
        loaded = load_checkpoint(folder, step=2, slices=[], plan=plan_of(world_size=num_saving), rank=rank)
        assert loaded.rank_state is not None
        assert loaded.rank_state["rank"].item() == rank


def save_through_streams(rank: int, folder: Path) -> bool:
    """As on CUDA, where copies to the host are late."""
    with played_cuda():
        return save_behind_a_gate(rank, folder)


def save_behind_a_gate(rank: int, folder: Path) -> bool:
    """Whether the second save came back after the first could be written."""
    gate = threading.Event()
    write_shard = writer_module.write_shard

    def gated_write_shard(*args: object, **options: object) -> object:
        assert gate.wait(timeout=30), "the first save did not come back, so that nobody opened the gate"
        return write_shard(*args, **options)

    writer_module.write_shard = gated_write_shard
    writer = create_writer(folder)
    slices = make_slices(step=1, rank=rank, num_ranks=2, cut=2)
    writer.save(step=1, slices=slices, state=state_of(plan_of(world_size=2), step=1))
    for each in slices:
        each.tensor.zero_()
    threading.Timer(0.3, gate.set).start()
    save(writer, rank, 2)
    waited = gate.is_set()
    writer.wait()
    return waited


@pytest.mark.parametrize("save_twice", [save_behind_a_gate, save_through_streams])
def test_the_next_step_neither_waits_for_a_save_nor_changes_it(
    tmp_path: Path, save_twice: Callable[[int, Path], bool]
) -> None:
    """A save returns while its files cannot be written yet; the one after it waits for it."""
    assert run_ranks(save_twice, 2, tmp_path) == [True, True]
    assert_holds(tmp_path, 1)
    assert_holds(tmp_path, 2)


def save_with_a_full_disk(rank: int, folder: Path, asynchronous: bool) -> list[str | None]:
    writer = create_writer(folder, asynchronous=asynchronous)
    write_shard = writer_module.write_shard

    def full_disk(path: Path, *args: object, **options: object) -> object:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write_shard(path, *args, **options)

    save(writer, rank, 1)
    writer.wait()
    writer_module.write_shard = full_disk
    errors = [error_of(lambda: save(writer, rank, 2))]
    errors.append(error_of(writer.wait))
    writer_module.write_shard = write_shard
    left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert left == []
    # Until all have looked: the next save begins with a hidden folder.
    dist.barrier()
    save(writer, rank, 3)
    writer.wait()
    return errors


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_ranks_error_is_every_ranks_error(tmp_path: Path, asynchronous: bool) -> None:
    first, *others = run_ranks(save_with_a_full_disk, 3, tmp_path, asynchronous)
    assert all(errors == first for errors in others)
    [error] = [error for error in first if error is not None]
    assert first.index(error) == (1 if asynchronous else 0)
    assert "step 2 was not saved: on rank 1" in error
    assert "No space left" in error
    assert published_steps(tmp_path) == [1, 3]
    assert_holds(tmp_path, 3)


def fail_then_save(rank: int, folder: Path) -> str | None:
    writer = create_writer(folder)
    (folder / ".step_00000001.partial").touch()
    dist.barrier()
    save(writer, rank, 1)
    return error_of(lambda: save(writer, rank, 2))


def test_an_error_of_the_background_is_raised_by_the_next_save(tmp_path: Path) -> None:
    errors = run_ranks(fail_then_save, 2, tmp_path)
    assert errors[0] is not None
    assert "File exists" in errors[0]
    assert errors[0] == errors[1]
    assert published_steps(tmp_path) == []


def save_to_a_disk_of_each_host(rank: int, folder: Path, exists: bool) -> str | None:
    mine = folder / f"host{rank}"
    if exists:
        mine.mkdir()
    writer = create_writer(mine, asynchronous=False)
    return error_of(lambda: save(writer, rank, 1))


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_not_all_hosts_see(tmp_path: Path, exists: bool) -> None:
    errors = run_ranks(save_to_a_disk_of_each_host, 2, tmp_path, exists)
    assert errors[0] is not None
    assert "a file system that all hosts see" in errors[0]
    assert errors[0] == errors[1]


def save_overlapping(rank: int, folder: Path) -> list[str | None]:
    writer = create_writer(folder, asynchronous=False)
    state = state_of(plan_of(world_size=2), step=1)
    whole, none = make_slices(step=1), []
    calls = [
        lambda: writer.save(step=1, slices=whole, state=state),
        lambda: writer.save(step=1, slices=whole[1:] if rank == 0 else none, state=state),
    ]
    return [error_of(call) for call in calls]


def test_boxes_that_do_not_tile_are_not_published(tmp_path: Path) -> None:
    for twice, missing in run_ranks(save_overlapping, 2, tmp_path):
        assert "overlaps" in twice
        assert "weights/embedding.word_embeddings.weight: the model has shape (64, 8), the ranks saved None" in missing
    assert list(tmp_path.iterdir()) == []


def save_many(rank: int, folder: Path) -> None:
    writer = create_writer(folder, start_step=1, keep_last=2)
    for step in (1, 2, 2, 3, 4):
        save(writer, rank, step)
    writer.wait()


def test_the_newest_are_kept_and_the_one_that_the_run_started_from(tmp_path: Path) -> None:
    for step in (0, 1):
        save_alone(tmp_path, [make_slices(step=step)], state_of(plan_of(), step=step))
    published = (tmp_path / "step_00000001").stat().st_ino
    run_ranks(save_many, 2, tmp_path)
    assert published_steps(tmp_path) == [1, 3, 4]
    assert (tmp_path / "step_00000001").stat().st_ino == published, "the step it started from was saved again"
    assert_holds(tmp_path, 4)


def start_before_a_later_checkpoint(rank: int, folder: Path) -> str | None:
    return error_of(lambda: create_writer(folder, start_step=3))


def test_all_ranks_refuse_a_folder_of_a_later_run(tmp_path: Path) -> None:
    save_alone(tmp_path, [make_slices(step=9)], state_of(plan_of(), step=9))
    errors = run_ranks(start_before_a_later_checkpoint, 2, tmp_path)
    assert errors[0] is not None
    assert "step 9, later than step 3" in errors[0]
    assert errors[0] == errors[1]


def save_what_was_lost(rank: int, folder: Path) -> str | None:
    """Steps 1 to 3 are saved; a run that lost the last two makes them again, and one more."""
    writer = create_writer(folder, asynchronous=False)
    for step in (1, 2, 3):
        save(writer, rank, step)
    refused = error_of(lambda: create_writer(folder, start_step=1))
    own = state_of(plan_of(world_size=2), step=1)
    again = create_writer(folder, start_step=1, own=own, asynchronous=False)
    for step in (1, 2, 3, 4):
        save(again, rank, step)
    return refused


def test_a_run_that_lost_steps_keeps_its_own_later_checkpoints(tmp_path: Path) -> None:
    refused = run_ranks(save_what_was_lost, 2, tmp_path)
    assert all("later than step 1 where this run starts" in str(each) for each in refused)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_{step:08d}" for step in (1, 2, 3, 4)]
    for step in (1, 2, 3, 4):
        assert_holds(tmp_path, step)
