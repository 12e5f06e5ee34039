"""Keeps steps in an object store (S3 and compatible, GCS, Azure, a folder) as checkpoints that ``--load`` reads.

    URL/epochs/epoch_00000004.json                            who claimed the epoch: nobody else can; and its lineage
    URL/step_00000100/UPLOADING                               the step is none yet, unless SHA256SUMS is there
    URL/step_00000100/epoch_00000004.rank_00003.safetensors   a unit, as it lay in the memory of a node
    URL/step_00000100/epoch_00000004.rank_00003.json          its description, put when the unit is whole
    URL/step_00000100/manifest.json, state.json, held.json    put by the leader when all units are there
    URL/step_00000100/SHA256SUMS                              put last, and only if nobody else has: now the step counts

Every put is a whole object or none. Index files are only created, never put over another leader's. ``manifest.json`` is
the lock of a step: put first of the index and deleted last, so that who has put it is alone there, to publish the step
or to delete what is left of it.
"""

import asyncio
import dataclasses
import itertools
import random
import re
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from pydantic import ConfigDict

from hetero.checkpoint.folder import SUMS, UPLOADING, index_files, step_name, verified
from hetero.checkpoint.manifest import Manifest, merge
from hetero.checkpoint.state import CheckpointState
from hetero.elastic.records import Copy, HeldStep, RestorePoint
from hetero.elastic.store_connection import fix_of, is_refusal, open_store
from hetero.elastic.stored_step import StoredStep, first_line, unit_stem
from hetero.errors import CheckpointError, ConfigError, ObjectStoreError, ObjectStoreRefusedError
from hetero.serialization import STRICT, from_json, to_json
from hetero.units import MIB

R = TypeVar("R")

ATTEMPTS = 3
"""Of an upload that ends with another size than it should; what the network does is tried again below that."""

_PART_BYTES, _PARTS_AT_ONCE = 16 * MIB, 4
"""Of a unit that is sent as one request, and at a time: 64 MiB of an agent's memory."""

_SLOWEST_BYTES_PER_S = MIB / 8
"""A unit that is sent slower than that is given up."""

_HELD, _MANIFEST = "held.json", "manifest.json"
_STEP = re.compile(r"step_(\d{8,12})")
_EPOCH = re.compile(r"epoch_(\d{8,12})\.json")
_UNIT = re.compile(r"epoch_(\d{8,12})\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredHistory:
    """What a store says about its run.

    newest_claim: the highest epoch that somebody has claimed, 0 for none.
    ids, lineage: of that epoch (:class:`~hetero.elastic.records.Ancestry`).
    steps: the published steps, ascending.
    damaged: published steps whose description is none.
    """

    newest_claim: int = 0
    ids: dict[int, str] = field(default_factory=dict)
    lineage: dict[int, RestorePoint] = field(default_factory=dict)
    steps: tuple[HeldStep, ...] = ()
    damaged: tuple[int, ...] = ()


class ObjectStore:
    """The store of one run. Awaited by agents; what has no ``async`` is for ranks, whose reads wait.

    Args:
        url: ``s3://BUCKET/RUN``, ``gs://``, ``az://``, ``file:///FOLDER`` or, within one process, ``memory:///``.
        limit_s: after which a single operation is given up.

    Raises:
        ConfigError: no such kind of store, what the environment says of it is not enough, or a folder cannot be made.
    """

    def __init__(self, url: str, *, limit_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._store = open_store(url)

    async def claim_epoch(
        self,
        epoch: int,
        *,
        holder: str,
        lineage: Mapping[int, RestorePoint],
        ids: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Put a mark for ``epoch`` that nobody else has put, so that a leader that was evicted publishes no more.

        A claim of one's own is found again and stands.

        Raises:
            ObjectStoreError: the store does not answer.
            ConfigError: another holder has it, or the store puts over what it may only create.
        """
        key = _claim_key(epoch)
        claim = _Claim(epoch=epoch, holder=holder, lineage=dict(lineage), ids=dict(ids))
        content = to_json(claim).encode()
        if await self._create(key, content):
            if await self._create(key, content):
                await self._delete("epochs", [key.rpartition("/")[2]])
                raise ConfigError(
                    f"object store {self.url}: {key}: a put that may only create was let put over it, so that no claim "
                    "keeps others out; take a store that has create-only puts (If-None-Match: *)"
                )
            return
        if await self._claim(epoch) != claim:
            raise ConfigError(
                f"object store {self.url}: {key}: epoch {epoch} was claimed by another job, or before this one; two "
                "runs may not share a URL: give this job another --object-store"
            )

    async def newest_claim(self) -> int:
        """The highest epoch that somebody has claimed, 0 for none.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        names = await self._names("epochs")
        return max((int(found[1]) for name in names if (found := _EPOCH.fullmatch(name))), default=0)

    async def holder_of(self, epoch: int) -> str | None:
        """Who has claimed an epoch, ``None`` if nobody has.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        if f"epoch_{epoch:08d}.json" not in await self._names("epochs"):
            return None
        return (await self._claim(epoch)).holder

    async def history(self) -> StoredHistory:
        """What is here to go on from.

        Raises:
            ObjectStoreError: the store does not answer.
            ConfigError: the newest claim is not one of this version.
        """
        newest = await self.newest_claim()
        steps, damaged = [], []
        for step in await self._published():
            try:
                steps.append(await self._held(step))
            except CheckpointError:
                damaged.append(step)
        claim = await self._claim(newest) if newest else _Claim(epoch=0, holder="", lineage={})
        return StoredHistory(
            newest_claim=newest, ids=claim.ids, lineage=claim.lineage, steps=tuple(steps), damaged=tuple(damaged)
        )

    async def upload(self, copy: Copy, path: Path) -> None:
        """Upload a unit from its file, which has to stay as it is, and then its description.

        Raises:
            ObjectStoreError: it is not whole there after some attempts.
        """
        await self._put(f"{step_name(copy.step)}/{UPLOADING}", b"")
        name = f"{step_name(copy.step)}/{unit_stem(copy.epoch, copy.unit)}"
        key = f"{name}.safetensors"
        for attempt in itertools.count(1):
            put = obstore.put_async(self._store, key, path, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
            await self._awaited(put, key, more_s=copy.shard.size_bytes / _SLOWEST_BYTES_PER_S)
            size_bytes = (await self._awaited(obstore.head_async(self._store, key), key))["size"]
            if size_bytes == copy.shard.size_bytes:
                break
            if attempt == ATTEMPTS:
                raise ObjectStoreError(
                    f"object store {self.url}: {key}: it has {size_bytes} bytes after {attempt} uploads of "
                    f"{copy.shard.size_bytes}; the store cuts objects short, or {path} is not what was copied"
                )
            await asyncio.sleep(random.uniform(0, attempt))
        await self._put(f"{name}.json", to_json(copy).encode())

    async def uploaded(self, *, epoch: int, step: int) -> frozenset[str]:
        """The units of a step that are whole here.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        prefix = unit_stem(epoch, "")
        names = await self._names(step_name(step))
        return frozenset(
            name.removeprefix(prefix).removesuffix(".json")
            for name in names
            if name.startswith(prefix) and name.endswith(".json")
        )

    async def publish(self, *, epoch: int, step: int, units: Collection[str]) -> bool:
        """Make a checkpoint of units that are all here; only a leader whose claim is the newest should.

        Returns:
            Whether it is one now; ``False`` if the step has been published before, be it by an earlier epoch.

        Raises:
            ObjectStoreError: the store does not answer.
            ConfigError: a later epoch has been claimed.
            CheckpointError: a unit is not here, they are no whole state, or another leader's index is in the way.
        """
        folder = step_name(step)
        await self._check_claim(epoch)
        names = await self._names(folder)
        if SUMS in names:
            return False
        copies = []
        for unit in sorted(units):
            if (name := f"{unit_stem(epoch, unit)}.json") not in names:
                raise CheckpointError(f"object store {self.url}: {folder}/{name}: the unit has not been uploaded")
            text = await self._awaited(self._get(f"{folder}/{name}"), f"{folder}/{name}")
            copies.append(from_json(Copy, text.decode(), source=f"{self.url}/{folder}/{name}"))
        manifest, state = _merged(copies)
        held = HeldStep(epoch=epoch, step=step, units=frozenset(units))
        files = index_files(state, manifest, source=f"{self.url}/{folder}", more={_HELD: to_json(held).encode()})
        sums = files.pop(SUMS)
        for name, content in sorted(files.items(), key=lambda each: each[0] != _MANIFEST):
            if not await self._create_same(f"{folder}/{name}", content):
                if SUMS in await self._names(folder):
                    return False
                raise CheckpointError(
                    f"object store {self.url}: {folder}/{name}: another leader has begun to publish this step and was "
                    "ended; it is left alone"
                )
        # A later leader may have taken the units for leftovers before the step was locked.
        if gone := {shard.file for shard in manifest.shards} - set(await self._names(folder)):
            raise CheckpointError(f"object store {self.url}: {folder}/{min(gone)}: deleted by a later leader")
        try:
            if not await self._create(f"{folder}/{SUMS}", sums):
                return False
        except ObjectStoreError as error:
            # Put again it could stand alone, as the next leader may have deleted the step since.
            raise CheckpointError(f"{error}; whether step {step} was published is not known") from None
        await self._delete(folder, [UPLOADING, *(f"{unit_stem(epoch, unit)}.json" for unit in units)])
        return True

    async def delete(self, steps: Collection[int]) -> None:
        """Delete published steps.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        for step in sorted(steps):
            await self._delete_step(step)

    async def delete_leftovers(self, *, before_step: int, epoch: int) -> list[int]:
        """Delete what killed uploads of ``epoch`` and earlier ones left of steps before ``before_step``.

        Nothing of a later epoch, of which the leader of this one may not know yet; and no step whose index has been
        begun, as a leader that stands still may publish it yet.

        Returns:
            These steps.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        left = []
        for step in await self._steps_begun():
            names = await self._names(step_name(step)) if step < before_step else []
            later = [name for name in names if (found := _UNIT.match(name)) and int(found[1]) > epoch]
            if not names or _MANIFEST in names or later:
                continue
            if await self._create(f"{step_name(step)}/{_MANIFEST}", f"deleted by epoch {epoch}\n".encode()):
                await self._delete_files(step, names)
                left.append(step)
        return left

    def step(self, step: int) -> "StoredStep":
        """A published step, to be read.

        Raises:
            CheckpointError: it is not there, damaged, or cannot be reached.
        """
        return StoredStep(self._store, step, url=self.url)

    async def _check_claim(self, epoch: int) -> None:
        """Check that no later epoch has been claimed.

        Raises:
            ObjectStoreError: the store does not answer.
            ConfigError: one has.
        """
        if (newest := await self.newest_claim()) > epoch:
            raise ConfigError(
                f"object store {self.url}: epoch {newest} has been claimed, the leader of epoch {epoch} publishes no "
                "more; its node was evicted and joins again"
            )

    async def _create_same(self, key: str, content: bytes) -> bool:
        """Create an object; whether it has this content now.

        A leader that stood still while it published cannot spoil what the next one has published since.

        Raises:
            ObjectStoreError: the store does not answer.
        """
        return await self._create(key, content) or await self._awaited(self._get(key), key) == content

    async def _held(self, step: int) -> HeldStep:
        """What a published step says of itself.

        Raises:
            ObjectStoreError: the store does not answer.
            CheckpointError: it is damaged.
        """
        folder = step_name(step)
        contents = {name: await self._awaited(self._get(f"{folder}/{name}"), folder) for name in (SUMS, _HELD)}
        return verified(HeldStep, _HELD, contents.__getitem__, where=f"{self.url}/{folder}")

    async def _claim(self, epoch: int) -> "_Claim":
        key = _claim_key(epoch)
        text = await self._awaited(self._get(key), key)
        return from_json(_Claim, text.decode(), source=f"{self.url}/{key}")

    async def _published(self) -> list[int]:
        return [step for step in await self._steps_begun() if SUMS in await self._names(step_name(step))]

    async def _steps_begun(self) -> list[int]:
        listed = await self._awaited(obstore.list_with_delimiter_async(self._store), "")
        matches = (_STEP.fullmatch(prefix.rstrip("/")) for prefix in listed["common_prefixes"])
        return sorted(int(found[1]) for found in matches if found)

    async def _delete_step(self, step: int) -> None:
        """In an order in which a reader never takes what is left for a whole checkpoint."""
        folder = step_name(step)
        await self._put(f"{folder}/{UPLOADING}", b"")
        names = await self._names(folder)
        await self._delete(folder, [SUMS])
        await self._delete_files(step, names)

    async def _delete_files(self, step: int, names: Collection[str]) -> None:
        """Delete these files of a step that is not published, its lock after the others."""
        others = sorted(set(names) - {SUMS, _MANIFEST, UPLOADING})
        for each in (others, [_MANIFEST], [UPLOADING]):
            await self._delete(step_name(step), each)

    async def _delete(self, folder: str, names: Sequence[str]) -> None:
        """Delete those of the objects of a folder that are still there."""

        async def delete(keys: list[str]) -> None:
            try:
                await obstore.delete_async(self._store, keys)
            except FileNotFoundError:
                # For S3 it is no error that an object is gone; every other store stops there, with the rest left.
                for key in keys if len(keys) > 1 else ():
                    await delete([key])

        if names:
            await self._awaited(delete([f"{folder}/{name}" for name in names]), folder)

    async def _names(self, folder: str) -> list[str]:
        listed = await self._awaited(obstore.list_with_delimiter_async(self._store, folder), folder)
        # SeaweedFS lists a folder itself, for a while also after the last object of it is gone.
        found = (each["path"].rpartition("/") for each in listed["objects"])
        return [name for parent, _, name in found if parent == folder]

    async def _get(self, key: str) -> bytes:
        return bytes(await (await obstore.get_async(self._store, key)).bytes_async())

    async def _put(self, key: str, content: bytes) -> None:
        await self._awaited(obstore.put_async(self._store, key, content), key)

    async def _create(self, key: str, content: bytes) -> bool:
        """Put an object unless there is one; whether it was put."""
        try:
            await self._awaited(obstore.put_async(self._store, key, content, mode="create"), key)
        except _TakenError:
            return False
        return True

    async def _awaited(self, operation: Awaitable[R], key: str, *, more_s: float = 0.0) -> R:
        limit_s = self._limit_s + more_s
        try:
            async with asyncio.timeout(limit_s):
                return await operation
        except AlreadyExistsError:
            raise _TakenError(key) from None
        except TimeoutError:
            raise ObjectStoreError(
                f"object store {self.url}: {key}: no answer within {limit_s:g} s; is it reachable from here, "
                "and fast enough?"
            ) from None
        except (BaseError, OSError, ValueError) as error:
            kind = ObjectStoreRefusedError if is_refusal(error) else ObjectStoreError
            raise kind(f"object store {self.url}: {key}: {first_line(error)}; {fix_of(error)}") from None


class _TakenError(Exception):
    """An object that was to be created is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Claim:
    """What an epoch's mark says."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    epoch: int
    holder: str
    lineage: dict[int, RestorePoint]
    ids: dict[int, str] = field(default_factory=dict)


def _merged(copies: Sequence[Copy]) -> tuple[Manifest, CheckpointState]:
    """The checkpoint that units add up to.

    Raises:
        CheckpointError: they do not, or are not of one step of one plan.
    """
    if not copies:
        raise CheckpointError("a checkpoint of no units: the placement of its epoch is empty")
    first = copies[0]
    for other in copies:
        if other.state != first.state:
            raise CheckpointError(
                f"units {first.unit} and {other.unit} of step {first.step} say different things of it: they are of two "
                "runs, or of two plans"
            )
    written = []
    for copy in copies:
        file = f"{unit_stem(copy.epoch, copy.unit)}.safetensors"
        written.append((dataclasses.replace(copy.shard, file=file), copy.tensors))
    return merge(written, first.state.model), first.state


def _claim_key(epoch: int) -> str:
    return f"epochs/epoch_{epoch:08d}.json"
