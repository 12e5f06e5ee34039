"""Keeps a committed step for its upload, by hard links to the files of a slot: copying goes on in new files.

Where the file system has no hard links, a thread copies the files. It has opened them when the step was committed, and
what is written into that slot meanwhile goes to new files, so that training waits for no copy.

    FOLDER/epoch_00000004/upload/UNIT.safetensors   what the owner of the unit has written
    FOLDER/epoch_00000004/upload/UNIT.json          its description, linked after it

Ranks make the links or copies, the agent uploads the files and removes them. All ranks of an epoch hold the same step:
each votes in the step's all-reduce that an upload is due and that its node holds none, and what is committed when all
have voted so is held. So a node whose uploads are slow lets all others wait, and no unit is uploaded in vain.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

from hetero.elastic.copy_folder import UPLOAD, copy_path, epoch_folder, read_copy, shard_path
from hetero.elastic.records import Copy, RankAssignment
from hetero.file_systems import PARTIAL_SUFFIX, copy_whole, was_linked
from hetero.private_files import is_own_folder


def upload_folder(folder: Path, epoch: int) -> Path:
    """Where the step of an epoch is that is held for its upload."""
    return epoch_folder(folder, epoch) / UPLOAD


def held_units(folder: Path, epoch: int, units: Sequence[str]) -> dict[str, tuple[Copy, Path]] | None:
    """Each of ``units`` with its file, once all of them are held; ``None`` before.

    Raises:
        CheckpointError: a description is damaged.
    """
    held = upload_folder(folder, epoch)
    found = {unit: copy for unit in units if (copy := read_copy(held, unit)) is not None}
    return {unit: (copy, shard_path(held, unit)) for unit, copy in found.items()} if len(found) == len(units) else None


def holds_any(folder: Path, epoch: int) -> bool:
    """Whether a node holds anything for an upload."""
    held = upload_folder(folder, epoch)
    return is_own_folder(held) and any(held.iterdir())


def is_being_copied(folder: Path, epoch: int) -> bool:
    """Whether a rank of the node is copying what it holds for an upload."""
    return any(upload_folder(folder, epoch).glob(f"*{PARTIAL_SUFFIX}"))


def release(folder: Path, epoch: int) -> None:
    """Let go of all that is held."""
    held = upload_folder(folder, epoch)
    for path in held.iterdir() if is_own_folder(held) else ():
        path.unlink(missing_ok=True)


class HeldUploads:
    """Decides on one rank when a step is due for its upload, and holds the units that this rank owns.

    Args:
        units: their names.
        world_size: number of ranks that vote.
    """

    def __init__(self, assignment: RankAssignment, *, units: Sequence[str], world_size: int) -> None:
        self._folder = Path(assignment.folder)
        self._epoch = assignment.epoch.number
        self._units = units
        self._world_size = world_size
        self._schedule = schedule = assignment.uploads
        self._last_step = schedule.after_step if schedule is not None else 0
        self._due_s = time.monotonic() + (schedule.in_s if schedule is not None else 0.0)
        self._copying: _CopyForUpload | None = None

    def vote(self, step: int | None) -> float:
        """What this rank adds to the votes: 1 if ``step``, which is being copied, is due and nothing is held."""
        if step is None or not self._is_due(step) or (self._copying is not None and self._copying.is_alive()):
            return 0.0
        return float(not holds_any(self._folder, self._epoch))

    def decide(self, votes: float, *, step: int, slot: Path) -> None:
        """Hold ``step``, which has just been committed, if all ranks have voted so.

        Args:
            slot: where it lies.
        """
        if round(votes) != self._world_size:
            return
        assert self._schedule is not None, "voted for"
        self._last_step = step
        self._due_s = time.monotonic() + (self._schedule.every_s or 0.0)
        held = upload_folder(self._folder, self._epoch)
        copying = _CopyForUpload(step)
        try:
            held.mkdir(exist_ok=True)
            for unit in self._units:
                # The description is the last of a unit: with it the unit counts as held.
                for path_of in (shard_path, copy_path):
                    source, target = path_of(slot, unit), path_of(held, unit)
                    if copying.has_files or not was_linked(source, target):
                        copying.add(source, target)
        except OSError as error:
            copying.close()
            _complain(step, error)
            return
        if copying.has_files:
            self._copying = copying
            copying.start()

    def leave_to_upload(self, path: Path) -> None:
        """Take away the name of a slot's file that is still being copied: what is written next is another file."""
        if self._copying is not None and self._copying.reads(path):
            path.unlink(missing_ok=True)

    def _is_due(self, step: int) -> bool:
        schedule = self._schedule
        if schedule is None:
            return False
        if schedule.every_steps is not None:
            return step // schedule.every_steps > self._last_step // schedule.every_steps
        return time.monotonic() >= self._due_s


class _CopyForUpload(threading.Thread):
    """Copies the files of a step, in the order in which they were added.

    A daemon: an end of the process does not wait for it, and a copy that is not whole never counts.
    """

    def __init__(self, step: int) -> None:
        super().__init__(name="copy-for-upload", daemon=True)
        self._step = step
        self._files: list[tuple[Path, FileIO, Path]] = []

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def add(self, source: Path, target: Path) -> None:
        """Open a file, whose content is copied even if its name is gone by then."""
        self._files.append((source, FileIO(source), target))

    def reads(self, path: Path) -> bool:
        """Whether a file may still be read."""
        return self.is_alive() and any(source == path for source, _, _ in self._files)

    def run(self) -> None:
        """Copy all files."""
        try:
            for _, file, target in self._files:
                copy_whole(file, target)
        except OSError as error:
            num_bytes = sum(os.fstat(file.fileno()).st_size for _, file, _ in self._files)
            _complain(self._step, error, needed_bytes=num_bytes)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of all files."""
        for _, file, _ in self._files:
            file.close()


def _complain(step: int, error: OSError, *, needed_bytes: int = 0) -> None:
    room = ""
    if needed_bytes and error.errno in (errno.ENOSPC, errno.EDQUOT):
        room = f" (without hard links an upload needs {needed_bytes:,} bytes there, beside those of both slots)"
    sys.stderr.write(f"hetero: step {step} is not held for its upload: {error}{room}; a later one will be\n")
