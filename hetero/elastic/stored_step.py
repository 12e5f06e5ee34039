"""Reads a step that was published in an object store; for ranks, whose reads wait."""

import contextlib
from collections.abc import Iterator
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError

from hetero.checkpoint.folder import manifest_in, state_in, step_name
from hetero.elastic.records import Copy
from hetero.errors import CheckpointError, SourceLostError
from hetero.serialization import MAX_FILE_BYTES
from hetero.shown_secrets import without_secrets

_ABSENT = (NotFoundError, FileNotFoundError)


class StoredStep:
    """A published step, unit by unit.

    Args:
        store: obstore's.
        url: of the store, for messages.

    Attributes:
        state: its scalars.
        manifest: checked.

    Raises:
        CheckpointError: it is not there, damaged, or cannot be reached.
    """

    def __init__(self, store: Any, step: int, *, url: str) -> None:
        self._store = store
        self._step = step
        self._where = f"{url}/{step_name(step)}"
        self.state = state_in(self._read, where=self._where)
        self.manifest = manifest_in(self._read, where=self._where)
        self._shards = {shard.file: shard for shard in self.manifest.shards}

    def copy(self, unit: str, *, epoch: int) -> Copy | None:
        """A unit as ``epoch`` has copied it, ``None`` if there is none."""
        shard = self._shards.get(f"{unit_stem(epoch, unit)}.safetensors")
        if shard is None:
            return None
        tensors = {block.name: self.manifest.tensors[block.name] for block in shard.boxes}
        return Copy(epoch=epoch, step=self._step, unit=unit, shard=shard, tensors=tensors, state=self.state)

    def file(self, copy: Copy) -> "StoredShardFile":
        """The file of a copy that is here, to be read by ranges."""
        name = copy.shard.file
        return StoredShardFile(self._store, f"{step_name(self._step)}/{name}", where=f"{self._where}/{name}")

    def _read(self, name: str) -> bytes:
        key = f"{step_name(self._step)}/{name}"
        try:
            result = obstore.get(self._store, key)
            if result.meta["size"] > MAX_FILE_BYTES:
                raise CheckpointError(
                    f"{self._where}/{name}: {result.meta['size']:,} bytes, at most {MAX_FILE_BYTES:,} are read"
                )
            return bytes(result.bytes())
        except _ABSENT:
            raise CheckpointError(f"{self._where}/{name}: damaged checkpoint: there is no such object") from None
        except (BaseError, OSError) as error:
            raise SourceLostError(f"{self._where}/{name}: cannot be read: {first_line(error)}") from None


class StoredShardFile:
    """A shard in an object store, as :class:`hetero.checkpoint.shard_files.ShardFile` wants it."""

    def __init__(self, store: Any, key: str, *, where: str) -> None:
        self._store = store
        self._key = key
        self.where = where

    def size_bytes(self) -> int:
        """Tell how long it is.

        Raises:
            CheckpointError: it is not there, or cannot be reached.
        """
        with self._as_checkpoint_errors():
            return int(obstore.head(self._store, self._key)["size"])

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill ``buffer`` with the bytes of the file from ``start`` on.

        Raises:
            CheckpointError: it ends before, or cannot be read.
        """
        if not len(buffer):
            return
        with self._as_checkpoint_errors():
            content = memoryview(obstore.get_range(self._store, self._key, start=start, length=len(buffer)))
        if len(content) != len(buffer):
            raise CheckpointError(
                f"{self.where}: it ends at {start + len(content)} bytes, {start + len(buffer)} are wanted: damaged"
            )
        buffer[:] = content

    @contextlib.contextmanager
    def _as_checkpoint_errors(self) -> Iterator[None]:
        try:
            yield
        except _ABSENT:
            raise CheckpointError(f"{self.where}: there is no such object: damaged") from None
        except (BaseError, OSError, ValueError) as error:
            raise SourceLostError(f"{self.where}: cannot be read: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """What an error of obstore says, without the internals that it shows after that, and without secrets.

    It repeats the URL of a request: an endpoint of the environment may have a password.
    """
    return without_secrets(" ".join(str(error).partition("\n\nDebug source")[0].split()))


def unit_stem(epoch: int, unit: str) -> str:
    """What the objects of a unit are called, up to their kind; those of two epochs never are called alike."""
    return f"epoch_{epoch:08d}.{unit}"
