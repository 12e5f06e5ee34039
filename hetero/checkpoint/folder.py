"""Names, publishes, finds and deletes the checkpoints in the folder of a run.

    FOLDER/step_00000100/            published: complete, and never changed again
        state.json                   scalars, see :mod:`hetero.checkpoint.state`
        manifest.json                blocks and their checksums, see :mod:`hetero.checkpoint.manifest`
        SHA256SUMS                   of the two, as ``sha256sum --check`` reads it
        rank_00000.safetensors ...   tensors
        UPLOADING                    unless SHA256SUMS is there as well, an upload is under way (:mod:`hetero.elastic`)
    FOLDER/.step_00000200.partial/   being written, or what a killed run left
    FOLDER/.step_00000050.deleted/   being deleted

A checkpoint appears by one rename, after everything in it has reached the disk. Where a file system cannot rename a
folder, its files are moved one by one, and it counts once the last of them, SHA256SUMS, is there, as an upload does.
The file system must be one that all hosts see, and one run at a time may save to a folder.
"""

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from hetero.checkpoint.manifest import Manifest, check_manifest
from hetero.checkpoint.state import CheckpointState
from hetero.checkpoint.write_errors import write_error
from hetero.errors import CheckpointError, ConfigError
from hetero.file_systems import REFUSALS
from hetero.private_files import delete_path
from hetero.serialization import MAX_FILE_BYTES, T, from_json, read_bytes, to_compact_json, to_json
from hetero.units import MIB

_PUBLISHED = re.compile(r"step_(\d{8,12})")
_LEFT_OVER = re.compile(r"\.step_\d{8,}\.(partial|deleted)")
_STATE, _MANIFEST = "state.json", "manifest.json"

_PART_BYTES = 256 * MIB
"""A disk of 10 MB/s takes half a minute for it."""

_WAIT_BEFORE_WRITE_WAIT_AFTER = 7
"""Flags of ``sync_file_range`` that together wait for all data of a range."""

SUMS = "SHA256SUMS"
"""The file of a checkpoint that says what its other ones are."""

UPLOADING = "UPLOADING"
"""Lies in the folder of a step that is being uploaded file by file, or was until the upload was killed."""


def step_name(step: int) -> str:
    """What the folder of a published checkpoint is called."""
    return f"step_{step:08d}"


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is once it is published."""
    return folder / step_name(step)


def partial_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is while it is written."""
    return folder / f".step_{step:08d}.partial"


def published_steps(folder: Path) -> list[int]:
    """The steps of all published checkpoints, ascending; none if there is no such folder."""
    if not folder.is_dir():
        return []
    matches = (
        _PUBLISHED.fullmatch(path.name) for path in folder.iterdir() if path.is_dir() and not _is_being_uploaded(path)
    )
    return sorted(int(match[1]) for match in matches if match)


def _is_being_uploaded(path: Path) -> bool:
    """Whether the files of a step are still put here one by one, or were deleted so up to an empty folder."""
    return not (path / SUMS).exists() and ((path / UPLOADING).exists() or not any(path.glob("*")))


def latest_step(folder: Path) -> int | None:
    """The newest published step, ``None`` if there is none."""
    return max(published_steps(folder), default=None)


def prepare(folder: Path, *, start_step: int, own: CheckpointState | None = None) -> None:
    """Make ``folder`` ready for a run that starts at ``start_step``: create it, delete what killed runs left.

    Args:
        own: a state of this run, if it has been here before: later checkpoints may be its own then.

    Raises:
        ConfigError: it holds checkpoints of later steps of another run, which would be mixed up with this run's.
        CheckpointError: it cannot be written.
    """
    newest = latest_step(folder)
    if (
        newest is not None
        and newest > start_step
        and not (own is not None and _may_be_of(step_folder(folder, newest), own))
    ):
        raise ConfigError(
            f"{folder}: it has a checkpoint of step {newest}, later than step {start_step} where this run starts; "
            "continue from that one (--load), save to another folder, or move the later ones away"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                delete_path(path)
    except OSError as error:
        raise write_error(folder, error) from None


def _may_be_of(checkpoint: Path, own: CheckpointState) -> bool:
    """Whether a checkpoint is of the run of ``own``, or too damaged to say."""
    try:
        return read_state(checkpoint).is_of_same_run(own)
    except CheckpointError:
        return True


def whole_state(checkpoint: Path) -> CheckpointState | None:
    """Return the scalars of a checkpoint whose files are all there at their whole length, else ``None``."""
    try:
        state, manifest = read_state(checkpoint), read_manifest(checkpoint)
        sizes = {shard.file: (checkpoint / shard.file).stat().st_size for shard in manifest.shards}
    except (CheckpointError, OSError):
        return None
    return state if all(sizes[shard.file] == shard.size_bytes for shard in manifest.shards) else None


def publish(folder: Path, *, step: int, state: CheckpointState, manifest: Manifest) -> Path:
    """Turn the partial folder of ``step``, whose shards are on disk, into a checkpoint; returns its folder.

    It takes the place of another checkpoint of that step.

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
    for name, text in index_files(state, manifest, source=str(partial)).items():
        _write_to_disk(partial / name, text)
    fsync(partial)
    published = step_folder(folder, step)
    replaced = _take_name(folder, step) if published.exists() else None
    if replaced == published:
        _delete_folder(replaced)
    _give_name(partial, published)
    fsync(folder)
    if replaced is not None and replaced != published:
        # The new one is there by now: deleting may take long, and what cannot be deleted the next run deletes.
        with contextlib.suppress(OSError):
            _delete_folder(replaced)
    return published


def _give_name(partial: Path, published: Path) -> None:
    """Let a checkpoint appear by one rename; where a folder cannot be renamed, file by file and as if uploaded."""
    try:
        partial.rename(published)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    else:
        return
    published.mkdir(exist_ok=True)
    (published / UPLOADING).touch()
    for path in sorted(partial.iterdir(), key=lambda path: path.name == SUMS):
        path.rename(published / path.name)
    fsync(published)
    (published / UPLOADING).unlink()
    partial.rmdir()


def index_files(
    state: CheckpointState, manifest: Manifest, *, source: str, more: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """By name, the files of a checkpoint beside its shards: the last one has the checksums of the others.

    Args:
        more: other small files of the same folder.

    Raises:
        CheckpointError: one is too large to be read again. ``source`` names the checkpoint.
    """
    # A quarter of a million blocks take 7 s to indent, which a training step would feel, and 0.2 s as they are.
    texts = {_STATE: to_json(state).encode(), _MANIFEST: to_compact_json(manifest), **(more or {})}
    for name, text in texts.items():
        if len(text) > MAX_FILE_BYTES:
            raise CheckpointError(f"{source}/{name}: {len(text):,} bytes, and no more than {MAX_FILE_BYTES:,} are read")
    sums = "".join(f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in texts.items())
    return {**texts, SUMS: sums.encode()}


def keep_newest(
    folder: Path, keep_last: int, *, protected_steps: Collection[int] = (), advance: Callable[[], None] = lambda: None
) -> None:
    """Delete all published checkpoints but the ``keep_last`` newest and those of ``protected_steps``.

    Args:
        advance: called after every file.
    """
    for step in published_steps(folder)[:-keep_last]:
        if step not in protected_steps:
            _delete_folder(_take_name(folder, step), advance)


def _delete_folder(deleted: Path, advance: Callable[[], None] = lambda: None) -> None:
    """Delete a folder of a checkpoint that counts no more; of a link to one, the link alone."""
    if deleted.is_symlink():
        deleted.unlink()
        return
    # Its mark goes last: files under the name of a step would count without it.
    for path in sorted(deleted.iterdir(), key=lambda path: path.name == UPLOADING):
        if not path.is_dir():
            path.unlink()
            advance()
    shutil.rmtree(deleted)


def _take_name(folder: Path, step: int) -> Path:
    """Let the checkpoint of a step count no more; returns the folder that is to be deleted."""
    published = step_folder(folder, step)
    try:
        return published.rename(folder / f".step_{step:08d}.deleted")
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
    (published / UPLOADING).touch()
    (published / SUMS).unlink(missing_ok=True)
    return published


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # CIFS and some of FUSE have nothing to do for names, and say so.
        if not path.is_dir() or error.errno not in {errno.EINVAL, *REFUSALS}:
            raise
    finally:
        os.close(descriptor)


def fsync_in_parts(path: Path, advance: Callable[[], None]) -> None:
    """Wait until a large file is on the disk.

    A host may keep hundreds of gigabytes in memory that a file system takes minutes for; ``fsync`` says nothing until
    the end of that.

    Args:
        advance: called after every part that is on the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, os.fstat(descriptor).st_size, _PART_BYTES):
            _write_back(descriptor, start, _PART_BYTES)
            advance()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_back(descriptor: int, start: int, num_bytes: int) -> None:
    """Wait until a range of a file is on the disk, where the kernel and the file system know how (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "sync_file_range"):
        return
    arguments = ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(num_bytes)
    if libc.sync_file_range(*arguments, ctypes.c_uint(_WAIT_BEFORE_WRITE_WAIT_AFTER)) != 0:
        number = ctypes.get_errno()
        # The kernel reports an error of the disk once: fsync would not report it again.
        if number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The published checkpoint of ``step``, the newest for ``None``.

    Raises:
        CheckpointError: there is none.
    """
    steps = published_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder}: no checkpoint here (looked for folders named step_00000000)")
    if step is not None and step not in steps:
        shown = ", ".join(map(str, steps))
        raise CheckpointError(f"{folder}: no checkpoint of step {step}; there are {shown}: choose one of these")
    return step_folder(folder, steps[-1] if step is None else step)


def read_state(checkpoint: Path) -> CheckpointState:
    """The scalars of a published checkpoint.

    Raises:
        CheckpointError: damaged or missing.
    """
    return state_in(_local_files(checkpoint), where=str(checkpoint))


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a published checkpoint, checked.

    Raises:
        CheckpointError: damaged or missing, or it does not describe whole tensors in this folder.
    """
    return manifest_in(_local_files(checkpoint), where=str(checkpoint))


def state_in(read: Callable[[str], bytes], *, where: str) -> CheckpointState:
    """The scalars of a checkpoint, wherever it lies.

    Args:
        read: gives the content of a file by its name.
        where: the folder or address of the checkpoint, which ends in the name of its step.

    Raises:
        CheckpointError: as ``read`` does, or damaged.
    """
    state = verified(CheckpointState, _STATE, read, where=where)
    if where.rpartition("/")[2] != step_name(state.step):
        raise CheckpointError(
            f"{where}/{_STATE}: it is of step {state.step}, its folder is not; give the folder its own name"
        )
    return state


def manifest_in(read: Callable[[str], bytes], *, where: str) -> Manifest:
    """The manifest of a checkpoint, wherever it lies, checked; arguments as of :func:`state_in`.

    Raises:
        CheckpointError: as ``read`` does, or damaged, or it does not describe whole tensors.
    """
    manifest = verified(Manifest, _MANIFEST, read, where=where)
    check_manifest(manifest, source=f"{where}/{_MANIFEST}")
    return manifest


def verified(cls: type[T], name: str, read: Callable[[str], bytes], *, where: str) -> T:
    """A small file of a checkpoint, by its checksum; arguments as of :func:`state_in`.

    Raises:
        CheckpointError: as ``read`` does, or damaged.
    """
    sums, text = read(SUMS), read(name)
    if f"{hashlib.sha256(text).hexdigest()}  {name}\n".encode() not in sums:
        raise CheckpointError(f"{where}/{name}: its checksum is not the one in {SUMS}: one of them is damaged")
    try:
        return from_json(cls, text.decode(), source=f"{where}/{name}")
    except (ConfigError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where}/{name}: not a file of this version of the format: {error}") from None


def _local_files(checkpoint: Path) -> Callable[[str], bytes]:
    def read(name: str) -> bytes:
        try:
            return read_bytes(checkpoint / name)
        except ConfigError as error:
            raise CheckpointError(f"{checkpoint}: damaged checkpoint: {error}; load another step") from None

    return read


def _write_to_disk(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync(path)
