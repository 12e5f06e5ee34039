"""Loads a checkpoint into the slices of any plan."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from hetero.checkpoint.folder import find_checkpoint, read_manifest, read_state
from hetero.checkpoint.manifest import Manifest, Region, SavedBlock, Shard, index_within, overlap
from hetero.checkpoint.shard_files import LocalShardFile, ShardFile
from hetero.checkpoint.shards import DTYPE_OF, ShardReader
from hetero.checkpoint.state import CheckpointState
from hetero.errors import CheckpointError
from hetero.plan.ir import Plan
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.model import ModelSpec, differing_fields

T = TypeVar("T")

_WEIGHT_KINDS = ("weights", "master")

_FILES_AT_ONCE = 4
"""That are read side by side: one thread gets less than a GiB/s out of a socket, and files lie on several nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedCheckpoint:
    """What a checkpoint holds beside the slices that were filled from it.

    path: the published folder.
    rank_state: what this rank saved of its own; ``None`` where another plan saved it.
    notes: what the user should know, in sentences.
    """

    path: Path
    state: CheckpointState
    rank_state: dict[str, torch.Tensor] | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A saved block, or the part of it that a slice wants, into that slice."""

    source: tuple[slice, ...]
    target: torch.Tensor


def load_checkpoint(
    folder: Path,
    *,
    step: int | None,
    slices: Sequence[TensorSlice],
    plan: Plan,
    rank: int,
    only_weights: bool = False,
) -> LoadedCheckpoint:
    """Fill this rank's ``slices`` from a published checkpoint, whatever plan saved it.

    No collective inside: call it on all ranks with one ``step`` (that of rank 0, where it is the newest). Every block
    is verified before it is copied; everything but damage inside a shard is found before the first slice changes.

    ``master/X`` is taken from ``weights/X`` where the checkpoint has no master weights, and ``weights/X`` from
    ``master/X`` where it was saved in another precision than is wanted.

    Args:
        step: ``None`` for the newest.
        only_weights: leave the slices of the optimizer as they are.

    Raises:
        CheckpointError: none there, of another model, without something that is wanted, or damaged.
    """
    path = find_checkpoint(folder, step)
    state = read_state(path)
    check_model(str(path), saved=state.model, wanted=plan.model)
    saved = SavedTensors(path)
    wanted = [each for each in slices if not only_weights or each.name.partition("/")[0] in _WEIGHT_KINDS]
    same_plan = state.plan == plan and not only_weights
    rank_state = saved.rank_state(rank) if same_plan else None
    saved.fill(wanted)
    notes = _notes(path, state, plan, only_weights=only_weights)
    return LoadedCheckpoint(path=path, state=state, rank_state=rank_state, notes=notes)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A place that has a shard.

    shard: as this place describes it. All places of a shard have the same blocks; their checksums may differ where
        several ranks of unlike devices have computed them.
    """

    shard: Shard
    file: ShardFile


def _nobody_is_told(source: ShardSource, error: CheckpointError) -> None:
    pass


class ShardedTensors:
    """Tensors whose blocks lie in shards, each of which may be had from several places.

    Args:
        where: names all of it for messages.
        sources: by file name of each shard its places, in the order in which they are asked. What one of them does not
            have, or has damaged, is taken from the next.
        discarded: is told of every place that is given up. Like the places themselves, it is called by several threads,
            of which no two read the same shard at a time.
    """

    def __init__(
        self,
        where: str,
        manifest: Manifest,
        sources: Mapping[str, Iterable[ShardSource]],
        *,
        discarded: Callable[[ShardSource, CheckpointError], None] = _nobody_is_told,
    ) -> None:
        self._where = where
        self._manifest = manifest
        self._discarded = discarded
        self._sources = {shard.file: iter(sources[shard.file]) for shard in manifest.shards}
        self._readers: dict[str, tuple[ShardSource, ShardReader]] = {}
        self._blocks_of: dict[str, list[tuple[Shard, SavedBlock]]] = {}
        for shard, block in manifest.blocks():
            self._blocks_of.setdefault(block.name, []).append((shard, block))

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor was saved in.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self._where}: its manifest has no tensor {name}; load another step")
        return DTYPE_OF[self._manifest.tensors[name].dtype]

    def check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that weights, or master weights, are here in these shapes, in files that are as large as that takes.

        Reads no more than the headers of shards: before memory is allocated for what a checkpoint says that it holds,
        it is known that it does.

        Raises:
            CheckpointError: they are missing or of another shape, or a shard is missing or damaged.
        """
        for name, shape in shapes.items():
            saved = [each for kind in _WEIGHT_KINDS if (each := f"{kind}/{name}") in self._manifest.tensors]
            if not saved:
                raise CheckpointError(f"{self._where}: its manifest has no tensor weights/{name}; load another step")
            for each in saved:
                self._check_shape(each, shape)
                for shard, _ in self._blocks_of.get(each, ()):
                    self._check(shard.file)

    def fill(self, slices: Sequence[TensorSlice]) -> None:
        """Read what ``slices`` want, some files at a time; every block once, verified before it is copied.

        Raises:
            CheckpointError: a tensor is missing, or a shard is missing or damaged.
        """
        copies = self._copies(slices)
        files = [shard.file for shard in self._manifest.shards if shard.file in copies]
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="shard-reader") as readers:
            # A pass that fails is told of by its first file.
            list(readers.map(self._check, files))
            list(readers.map(lambda file: self._fill_from(file, dict(copies[file])), files))

    def rank_state(self, rank: int) -> dict[str, torch.Tensor] | None:
        """What ``rank`` saved of its own.

        Raises:
            CheckpointError: its shard is missing or damaged.
        """
        own = [shard for shard in self._manifest.shards if shard.rank == rank]
        if not own:
            return None
        found: dict[str, torch.Tensor] = {}
        for shard in (each for each in own if each.rank_state):
            found |= self._from_first_good(shard.file, lambda source, reader: reader.rank_state())
        return found

    def _fill_from(self, file: str, needed: dict[SavedBlock, list[_Copy]]) -> None:
        self._from_first_good(file, partial(self._copy_blocks, needed))

    def _check(self, file: str) -> None:
        self._from_first_good(file, lambda source, reader: reader.check())

    def _from_first_good(self, file: str, read: Callable[[ShardSource, ShardReader], T]) -> T:
        """Let ``read`` have a shard from one place after the other until one has it whole.

        Raises:
            CheckpointError: none has.
        """
        errors: list[str] = []
        while True:
            if file not in self._readers:
                source = next(self._sources[file], None)
                if source is None:
                    raise CheckpointError("; ".join(errors) or f"{self._where}: nobody has {file}; load another step")
                self._readers[file] = source, ShardReader(source.file, source.shard)
            source, reader = self._readers[file]
            try:
                return read(source, reader)
            except CheckpointError as error:
                errors.append(str(error))
                del self._readers[file]
                self._discarded(source, error)

    def _copy_blocks(self, needed: dict[SavedBlock, list[_Copy]], source: ShardSource, reader: ShardReader) -> None:
        """Copy what is needed of a shard, and take it out of ``needed`` as soon as it is there."""
        by_key = {block.key: block for block in needed}
        for described, tensor in reader.blocks([each for each in source.shard.boxes if each.key in by_key]):
            block = by_key.pop(described.key)
            if tensor.dtype != self.dtype(block.name):
                raise CheckpointError(
                    f"{source.file.where}: {block.key} is {tensor.dtype}, its manifest says "
                    f"{self._manifest.tensors[block.name].dtype}: damaged; load another step"
                )
            for copy in needed.pop(block):
                copy.target.copy_(tensor[copy.source])
        if by_key:
            raise CheckpointError(f"{source.file.where}: it has no {next(iter(by_key))}; load another step")

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        shape = self._manifest.tensors[name].shape
        if shape != wanted:
            raise CheckpointError(f"{self._where}: {name} has shape {list(shape)}, the model needs {list(wanted)}")

    def _copies(self, slices: Sequence[TensorSlice]) -> dict[str, dict[SavedBlock, list[_Copy]]]:
        """What to copy from each block of each shard file."""
        copies: dict[str, dict[SavedBlock, list[_Copy]]] = {}
        missing = []
        for each in slices:
            source = _source(self._manifest, each)
            if source is None:
                missing.append(each.name)
                continue
            self._check_shape(source, each.shape)
            num_found = 0
            wanted = Region(offsets=each.offsets, shape=tuple(each.tensor.shape))
            for shard, block in self._blocks_of[source]:
                if (edges := overlap(block, wanted)) is None:
                    continue
                num_found += math.prod(end - start for start, end in edges)
                target = each.tensor.detach()[index_within(edges, each.offsets)]
                copies.setdefault(shard.file, {}).setdefault(block, []).append(
                    _Copy(index_within(edges, block.offsets), target)
                )
            assert num_found == each.tensor.numel(), (each.name, each.offsets, each.tensor.shape)
        if missing:
            raise CheckpointError(_describe_missing(self._where, self._manifest, missing))
        return copies


class SavedTensors(ShardedTensors):
    """The tensors of a published checkpoint.

    Raises:
        CheckpointError: its manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        manifest = read_manifest(path)
        files = {shard.file: [ShardSource(shard, LocalShardFile(path / shard.file))] for shard in manifest.shards}
        super().__init__(str(path), manifest, files)


def check_model(where: str, *, saved: ModelSpec, wanted: ModelSpec) -> None:
    """Check that a checkpoint is of the model that is trained.

    Raises:
        CheckpointError: it is of another one; names what differs. ``where`` names the checkpoint.
    """
    names = differing_fields(saved, wanted)
    if not names:
        return
    fix = "start this run with the checkpoint's model"
    if names == ["padded_vocab_size"]:
        fix = f"choose --make-vocab-size-divisible-by so that the vocabulary is padded to {saved.padded_vocab_size}"
    differing = ", ".join(f"{name} {getattr(saved, name)} != {getattr(wanted, name)}" for name in names)
    raise CheckpointError(f"{where}: checkpoint of another model: {differing} here; {fix}")


def _source(manifest: Manifest, wanted: TensorSlice) -> str | None:
    """The saved tensor that fills ``wanted``."""
    kind, _, name = wanted.name.partition("/")
    weights, master = f"weights/{name}", f"master/{name}"
    match kind:
        case "master":
            order = [master, weights]
        case "weights":
            saved = manifest.tensors.get(weights)
            same = saved is not None and f"torch.{saved.dtype}" == str(wanted.tensor.dtype)
            order = [weights, master] if same else [master, weights]
        case _:
            order = [wanted.name]
    return next((each for each in order if each in manifest.tensors), None)


def _describe_missing(path: str, manifest: Manifest, missing: Sequence[str]) -> str:
    kinds = sorted({name.partition("/")[0] for name in manifest.tensors})
    examples = ", ".join(missing[:2]) + (f" and {len(missing) - 2} more" if len(missing) > 2 else "")
    return (
        f"{path}: it has no {examples}; it holds {', '.join(kinds)} only. To start from its weights with a new "
        "optimizer, load the weights alone (--finetune)"
    )


def _notes(path: Path, state: CheckpointState, plan: Plan, *, only_weights: bool) -> tuple[str, ...]:
    notes = []
    if only_weights:
        notes.append(f"{path}: weights only; the optimizer, the random numbers and the data start anew")
    elif state.plan != plan:
        notes.append(f"{path}: saved under another plan; random numbers, which are per rank, start anew from the seed")
    if state.precision != plan.precision:
        notes.append(f"{path}: saved in {state.precision}, loaded in {plan.precision}")
    return tuple(notes)
