"""Names, publishes, finds and deletes the checkpoints in the folder of a run.

    FOLDER/step_00000100/            published: complete, and never changed again
        state.json                   scalars, see :mod:`hetero.checkpoint.state`
        manifest.json                blocks and their checksums, see :mod:`hetero.checkpoint.manifest`
        SHA256SUMS                   of the two, as ``sha256sum --check`` reads it
        rank_00000.safetensors ...   tensors
    FOLDER/.step_00000200.partial/   being written, or what a killed run left
    FOLDER/.step_00000050.deleted/   being deleted

A checkpoint appears by one rename, after everything in it has reached the disk. The file system must be one that
all hosts see, and one run at a time may save to a folder.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from pydantic import TypeAdapter

from hetero.checkpoint.manifest import Manifest, check_manifest
from hetero.checkpoint.state import CheckpointState
from hetero.errors import CheckpointError, ConfigError
from hetero.serialization import MAX_FILE_BYTES, T, from_json, read_bytes, to_json

_PUBLISHED = re.compile(r"step_(\d{8,})")
_LEFT_OVER = re.compile(r"\.step_\d{8,}\.(partial|deleted)")
_STATE, _MANIFEST, _SUMS = "state.json", "manifest.json", "SHA256SUMS"


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is once it is published."""
    return folder / f"step_{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is while it is written."""
    return folder / f".step_{step:08d}.partial"


def published_steps(folder: Path) -> list[int]:
    """The steps of all published checkpoints, ascending; none if there is no such folder."""
    if not folder.is_dir():
        return []
    matches = (_PUBLISHED.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def latest_step(folder: Path) -> int | None:
    """The newest published step, ``None`` if there is none."""
    return max(published_steps(folder), default=None)


def prepare(folder: Path, *, start_step: int) -> None:
    """Make ``folder`` ready for a run that starts at ``start_step``: create it, delete what killed runs left.

    Raises:
        CheckpointError: it holds checkpoints of later steps, which would be mixed up with this run's; or it cannot
            be written.
    """
    newest = latest_step(folder)
    if newest is not None and newest > start_step:
        raise CheckpointError(
            f"{folder}: it has a checkpoint of step {newest}, later than step {start_step} where this run starts; "
            "continue from that one (--load), save to another folder, or move the later ones away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from None


def publish(folder: Path, *, step: int, state: CheckpointState, manifest: Manifest) -> Path:
    """Turn the partial folder of ``step``, whose shards are on disk, into a checkpoint; returns its folder.

    Raises:
        CheckpointError: a shard is not there, or blocks do not tile their tensors.
        OSError: the file system failed.
    """
    partial = partial_folder(folder, step)
    check_manifest(manifest, source=str(partial))
    for shard in manifest.shards:
        path = partial / shard.file
        if not path.is_file() or path.stat().st_size != shard.size_bytes:
            raise CheckpointError(
                f"{path}: rank {shard.rank} wrote it, but it cannot be seen here; checkpoints have to be saved to a "
                "file system that all hosts see"
            )
    # A quarter of a million blocks take 7 s to indent, which a training step would feel, and 0.2 s as they are.
    texts = {_STATE: to_json(state).encode(), _MANIFEST: TypeAdapter(Manifest).dump_json(manifest)}
    sums = ""
    for name, text in texts.items():
        if len(text) > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{partial / name}: {len(text):,} bytes, and no more than {MAX_FILE_BYTES:,} are read"
            )
        _write_to_disk(partial / name, text)
        sums += f"{hashlib.sha256(text).hexdigest()}  {name}\n"
    _write_to_disk(partial / _SUMS, sums.encode())
    fsync(partial)
    published = step_folder(folder, step)
    partial.rename(published)
    fsync(folder)
    return published


def keep_newest(folder: Path, keep_last: int, *, protected_step: int | None) -> None:
    """Delete all published checkpoints but the ``keep_last`` newest and that of ``protected_step``."""
    for step in published_steps(folder)[:-keep_last]:
        if step != protected_step:
            deleted = folder / f".step_{step:08d}.deleted"
            step_folder(folder, step).rename(deleted)
            shutil.rmtree(deleted)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The published checkpoint of ``step``, the newest for ``None``.

    Raises:
        CheckpointError: there is none.
    """
    steps = published_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder}: no checkpoint here (looked for folders named step_00000000)")
    if step is not None and step not in steps:
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    return step_folder(folder, steps[-1] if step is None else step)


def read_state(checkpoint: Path) -> CheckpointState:
    """The scalars of a published checkpoint.

    Raises:
        CheckpointError: damaged or missing.
    """
    state = _read_verified(CheckpointState, checkpoint, _STATE)
    if checkpoint != step_folder(checkpoint.parent, state.step):
        raise CheckpointError(
            f"{checkpoint / _STATE}: it is of step {state.step}, its folder is not; give the folder its own name"
        )
    return state


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a published checkpoint, checked.

    Raises:
        CheckpointError: damaged or missing, or it does not describe whole tensors in this folder.
    """
    manifest = _read_verified(Manifest, checkpoint, _MANIFEST)
    check_manifest(manifest, source=str(checkpoint / _MANIFEST))
    return manifest


def _read_verified(cls: type[T], checkpoint: Path, name: str) -> T:
    path = checkpoint / name
    try:
        sums, text = read_bytes(checkpoint / _SUMS), read_bytes(path)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint}: damaged checkpoint: {error}; load another step") from None
    if f"{hashlib.sha256(text).hexdigest()}  {name}\n".encode() not in sums:
        raise CheckpointError(f"{path}: its checksum is not the one in {_SUMS}: one of them is damaged")
    try:
        return from_json(cls, text.decode(), source=str(path))
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a file of this version of the format: {error}") from None


def _write_to_disk(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync(path)
