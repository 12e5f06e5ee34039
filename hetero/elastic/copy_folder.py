"""Names what lies in a node's folder of copies, and says what is there.

    FOLDER/newest_epoch.json                        the newest epoch that the node has seen: NodeMemory
    FOLDER/epoch_00000004/placement.json            all units of the epoch
    FOLDER/epoch_00000004/slot_0/UNIT.safetensors   a unit after one step
    FOLDER/epoch_00000004/slot_0/UNIT.json          says that the file is whole: :class:`hetero.elastic.records.Copy`
    FOLDER/epoch_00000004/slot_1/...                after another step

A unit's JSON is removed before its file is written and renamed into place after, so that a reader never takes a half
written file for a copy. Checksums say the rest. What has another name, or is a link, is neither read nor deleted.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import stat
import threading
from pathlib import Path

from hetero.elastic.records import Ancestry, Copy, CopyPlacement, HeldStep, Inventory, NodeMemory
from hetero.errors import CheckpointError, ConfigError
from hetero.private_files import delete_path
from hetero.serialization import T, load, to_compact_json

SLOTS = (0, 1)
"""One holds the newest committed step while the other is written."""

UNIT_NAME = re.compile(r"rank_\d{5,}(\.held_\d{5,})?")

EPOCH_NAME = re.compile(r"epoch_(\d{8,12})")
"""Of an epoch's folder. Servers of copies read no longer numbers either."""

MEMORY_NAME = "newest_epoch.json"
PARTIAL_NAME = re.compile(r"\..+\.\d+\.partial")
"""Of a file while it is written."""

UPLOAD = "upload"
"""The folder of an epoch's step that is held for its upload."""

FOLDERS_OF_EPOCH = (*(f"slot_{slot}" for slot in SLOTS), UPLOAD)

_PLACEMENT = "placement.json"


def epoch_folder(folder: Path, epoch: int) -> Path:
    """Where the copies of an epoch are."""
    return folder / f"epoch_{epoch:08d}"


def slot_folder(folder: Path, epoch: int, slot: int) -> Path:
    """Where the copies of one step of an epoch are."""
    return epoch_folder(folder, epoch) / f"slot_{slot}"


def shard_path(slot: Path, unit: str) -> Path:
    """The file of a unit within the folder of a slot."""
    return slot / f"{unit}.safetensors"


def copy_path(slot: Path, unit: str) -> Path:
    """What says that the file of a unit is whole, and what is in it."""
    return slot / f"{unit}.json"


def epochs_in(folder: Path) -> list[int]:
    """The epochs that have a folder, ascending; none where the folder is gone, or cannot be read."""
    try:
        names = [path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in map(EPOCH_NAME.fullmatch, names) if match)


def write_placement(folder: Path, epoch: int, placement: CopyPlacement, *, epoch_id: str) -> None:
    """Begin an epoch: its folder appears with the list of its units.

    Copies of another epoch with this number, of a history that was given up, are deleted.
    """
    try:
        before = read_placement(folder, epoch)
        is_ours = before is None or before.epoch_id == epoch_id
    except CheckpointError:
        is_ours = False
    if not is_ours:
        delete_path(epoch_folder(folder, epoch))
    for slot in SLOTS:
        slot_folder(folder, epoch, slot).mkdir(parents=True, exist_ok=True)
    _write_whole(epoch_folder(folder, epoch) / _PLACEMENT, dataclasses.replace(placement, epoch_id=epoch_id))


def read_placement(folder: Path, epoch: int) -> CopyPlacement | None:
    """The units of an epoch, ``None`` if nothing of it is here.

    Raises:
        CheckpointError: the list is damaged.
    """
    return _read(CopyPlacement, epoch_folder(folder, epoch) / _PLACEMENT)


class MemoryOfEpochs:
    """What this node has seen of its job, noted where its copies are.

    Where memory is full nothing is noted, and the same has to be noted again later.

    Args:
        folder: of the copies.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: str | None = None
        self._lock = threading.Lock()

    def see(self, epoch: Ancestry, *, takes_part: bool) -> None:
        """Note an epoch, before any rank makes copies of it.

        It replaces the epoch that is noted if it followed that one. An epoch of another history does so only if this
        node takes part in it, and gives its own history up.
        """
        if epoch.id == self._seen:
            return
        with self._lock:
            memory = _memory(self._folder)
            is_noted = not epoch.replaces(memory.newest, takes_part=takes_part)
            if is_noted or self._write(dataclasses.replace(memory, newest=epoch)):
                self._seen = epoch.id

    def note_commit(self) -> None:
        """Note that a step may have been committed: one was, or the membership store has forgotten whether one was."""
        with self._lock:
            memory = _memory(self._folder)
            if not memory.has_committed:
                self._write(dataclasses.replace(memory, has_committed=True))

    def first_commit(self, epoch: int) -> None:
        """Note the first commit of an epoch; what earlier ones have left is not needed any more."""
        self.note_commit()
        remove_epochs_before(self._folder, epoch)

    def _write(self, memory: NodeMemory) -> bool:
        try:
            _write_whole(self._folder / MEMORY_NAME, memory)
        except OSError:
            return False
        return True


def _memory(folder: Path) -> NodeMemory:
    """What is noted in a folder; nothing if it is damaged."""
    with contextlib.suppress(CheckpointError):
        return _read(NodeMemory, folder / MEMORY_NAME) or NodeMemory()
    return NodeMemory()


def write_copy(slot: Path, copy: Copy) -> None:
    """Say that the file of a unit is whole."""
    _write_whole(copy_path(slot, copy.unit), copy)


def read_copy(slot: Path, unit: str) -> Copy | None:
    """What is in the file of a unit, ``None`` if there is none, or if it is being written.

    Raises:
        CheckpointError: its description is damaged.
    """
    return _read(Copy, copy_path(slot, unit))


def find_copy(folder: Path, *, epoch: int, step: int, unit: str) -> tuple[Path, Copy] | None:
    """The slot that has a unit as it was after ``step``, and what it has there; ``None`` if none has.

    Raises:
        CheckpointError: a description is damaged.
    """
    for number in SLOTS:
        slot = slot_folder(folder, epoch, number)
        copy = read_copy(slot, unit)
        if copy is not None and (copy.epoch, copy.step, copy.unit) == (epoch, step, unit):
            return slot, copy
    return None


def remove_copy(folder: Path, *, epoch: int, step: int, unit: str) -> None:
    """Forget a copy that is bad; a unit of which nothing is there is none."""
    for number in SLOTS:
        slot = slot_folder(folder, epoch, number)
        try:
            copy = read_copy(slot, unit)
        except CheckpointError:
            copy_path(slot, unit).unlink(missing_ok=True)
            continue
        if copy is not None and copy.step == step:
            copy_path(slot, unit).unlink(missing_ok=True)


def remove_epochs_before(folder: Path, epoch: int) -> None:
    """Delete the copies of earlier epochs, whose memory is needed again."""
    for each in epochs_in(folder):
        if each < epoch:
            # The agent and a rank may both be at it.
            shutil.rmtree(epoch_folder(folder, each), ignore_errors=True)


def forget_copies(folder: Path) -> None:
    """Delete all copies, and what is noted of their job.

    Raises:
        OSError: something of it cannot be deleted.
    """
    for epoch in epochs_in(folder):
        delete_path(epoch_folder(folder, epoch))
    (folder / MEMORY_NAME).unlink(missing_ok=True)


def used_bytes(folder: Path, *, before_epoch: int) -> int:
    """What copies of earlier epochs take up."""
    return sum(
        _allocated_bytes(path)
        for each in epochs_in(folder)
        if each < before_epoch
        for path in epoch_folder(folder, each).rglob("*")
    )


def _allocated_bytes(path: Path) -> int:
    """What a file takes up; nothing of anything else, or if it is gone."""
    try:
        status = path.lstat()
    except OSError:
        return 0
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0


def inventory(folder: Path, *, node: str) -> Inventory:
    """What a node has. A copy whose description is damaged is not there."""
    steps: dict[tuple[int, int], set[str]] = {}
    units_of_epoch, id_of_epoch = {}, {}
    for epoch in epochs_in(folder):
        try:
            placement = read_placement(folder, epoch)
        except CheckpointError:
            continue
        if placement is None:
            continue
        units_of_epoch[epoch] = frozenset(unit.name for unit in placement.units)
        id_of_epoch[epoch] = placement.epoch_id
        for number in SLOTS:
            slot = slot_folder(folder, epoch, number)
            for unit in units_of_epoch[epoch]:
                with contextlib.suppress(CheckpointError):
                    if (copy := read_copy(slot, unit)) is not None and copy.epoch == epoch:
                        steps.setdefault((epoch, copy.step), set()).add(unit)
    held = (HeldStep(epoch=epoch, step=step, units=frozenset(units)) for (epoch, step), units in sorted(steps.items()))
    return Inventory(
        node=node,
        steps=tuple(held),
        units_of_epoch=units_of_epoch,
        id_of_epoch=id_of_epoch,
        memory=_memory(folder),
    )


def _write_whole(path: Path, value: object) -> None:
    """Write a JSON file that appears whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(to_compact_json(value))
    partial.replace(path)


def _read(cls: type[T], path: Path) -> T | None:
    """What a file says, ``None`` where it is not there.

    Raises:
        CheckpointError: it is damaged, or cannot be read.
    """
    try:
        return load(cls, path) if os.path.lexists(path) else None
    except ConfigError as error:
        # It may have been taken away in between, to be written anew.
        if not os.path.lexists(path):
            return None
        raise CheckpointError(f"{path}: damaged: {error}") from None
