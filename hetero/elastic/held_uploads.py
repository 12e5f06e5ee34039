"""Keeps a committed step for its upload, by hard links to the files of a slot: copying goes on in new files.

    FOLDER/epoch_00000004/upload/UNIT.safetensors   what the owner of the unit has written
    FOLDER/epoch_00000004/upload/UNIT.json          its description, linked after it

Ranks make the links, the agent uploads what they are of and removes them. All ranks of an epoch hold the same step:
each votes in the step's all-reduce that an upload is due and that its node holds none, and what is committed when all
have voted so is held. So a node whose uploads are slow lets all others wait, and no unit is uploaded in vain.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hetero.elastic.copy_folder import copy_path, epoch_folder, read_copy, shard_path
from hetero.elastic.records import Copy, RankAssignment


def upload_folder(folder: Path, epoch: int) -> Path:
    """Where the step of an epoch is that is held for its upload."""
    return epoch_folder(folder, epoch) / "upload"


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
    return held.is_dir() and any(held.iterdir())


def release(folder: Path, epoch: int) -> None:
    """Let go of all that is held."""
    held = upload_folder(folder, epoch)
    for path in held.iterdir() if held.is_dir() else ():
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

    def vote(self, step: int | None) -> float:
        """What this rank adds to the votes: 1 if ``step``, which is being copied, is due and nothing is held."""
        if step is None or not self._is_due(step):
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
        try:
            held.mkdir(exist_ok=True)
            for unit in self._units:
                os.link(shard_path(slot, unit), shard_path(held, unit))
                os.link(copy_path(slot, unit), copy_path(held, unit))
        except OSError as error:
            sys.stderr.write(f"hetero: step {step} is not held for its upload: {error}; a later one will be\n")

    def _is_due(self, step: int) -> bool:
        schedule = self._schedule
        if schedule is None:
            return False
        if schedule.every_steps is not None:
            return step // schedule.every_steps > self._last_step // schedule.every_steps
        return time.monotonic() >= self._due_s
