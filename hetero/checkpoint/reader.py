"""Loads a checkpoint into the slices of any plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hetero.checkpoint.folder import find_checkpoint, read_manifest, read_state
from hetero.checkpoint.manifest import Manifest, Region, SavedBlock, Shard, index_within, overlap
from hetero.checkpoint.shards import DTYPE_OF, check_shard, read_blocks, read_rank_state
from hetero.checkpoint.state import CheckpointState
from hetero.errors import CheckpointError
from hetero.plan.ir import Plan
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.model import ModelSpec, differing_fields

_WEIGHT_KINDS = ("weights", "master")


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
    _check_model(path, saved=state.model, wanted=plan.model)
    saved = SavedTensors(path)
    wanted = [each for each in slices if not only_weights or each.name.partition("/")[0] in _WEIGHT_KINDS]
    same_plan = state.plan == plan and not only_weights
    rank_state = saved.rank_state(rank) if same_plan else None
    saved.fill(wanted)
    notes = _notes(path, state, plan, only_weights=only_weights)
    return LoadedCheckpoint(path=path, state=state, rank_state=rank_state, notes=notes)


class SavedTensors:
    """The tensors of a published checkpoint.

    Raises:
        CheckpointError: its manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._manifest = read_manifest(path)
        self._checked: set[str] = set()
        self._blocks_of: dict[str, list[tuple[Shard, SavedBlock]]] = {}
        for shard, block in self._manifest.blocks():
            self._blocks_of.setdefault(block.name, []).append((shard, block))

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor was saved in.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self._manifest.tensors:
            raise CheckpointError(f"{self._path}: its manifest has no tensor {name}; load another step")
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
                raise CheckpointError(f"{self._path}: its manifest has no tensor weights/{name}; load another step")
            for each in saved:
                self._check_shape(each, shape)
                for shard, _ in self._blocks_of.get(each, ()):
                    self._check(shard)

    def fill(self, slices: Sequence[TensorSlice]) -> None:
        """Read what ``slices`` want; every block once, verified before it is copied.

        Raises:
            CheckpointError: a tensor is missing, or a shard is missing or damaged.
        """
        copies = self._copies(slices)
        shards = [shard for shard in self._manifest.shards if shard.file in copies]
        for shard in shards:
            self._check(shard)
        for shard in shards:
            needed = copies[shard.file]
            for block, tensor in read_blocks(self._path, shard, list(needed)):
                if tensor.dtype != self.dtype(block.name):
                    raise CheckpointError(
                        f"{self._path / shard.file}: {block.key} is {tensor.dtype}, its manifest says "
                        f"{self._manifest.tensors[block.name].dtype}: damaged; load another step"
                    )
                for copy in needed[block]:
                    copy.target.copy_(tensor[copy.source])

    def rank_state(self, rank: int) -> dict[str, torch.Tensor] | None:
        """What ``rank`` saved of its own.

        Raises:
            CheckpointError: its shard is missing or damaged.
        """
        own = next((shard for shard in self._manifest.shards if shard.rank == rank), None)
        if own is None:
            return None
        self._check(own)
        return read_rank_state(self._path, own)

    def _check(self, shard: Shard) -> None:
        if shard.file not in self._checked:
            check_shard(self._path, shard)
            self._checked.add(shard.file)

    def _check_shape(self, name: str, wanted: tuple[int, ...]) -> None:
        shape = self._manifest.tensors[name].shape
        if shape != wanted:
            raise CheckpointError(f"{self._path}: {name} has shape {list(shape)}, the model needs {list(wanted)}")

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
            raise CheckpointError(_describe_missing(self._path, self._manifest, missing))
        return copies


def _check_model(path: Path, *, saved: ModelSpec, wanted: ModelSpec) -> None:
    names = differing_fields(saved, wanted)
    if not names:
        return
    fix = "start this run with the checkpoint's model"
    if names == ["padded_vocab_size"]:
        fix = f"choose --make-vocab-size-divisible-by so that the vocabulary is padded to {saved.padded_vocab_size}"
    differing = ", ".join(f"{name} {getattr(saved, name)} != {getattr(wanted, name)}" for name in names)
    raise CheckpointError(f"{path}: checkpoint of another model: {differing} here; {fix}")


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


def _describe_missing(path: Path, manifest: Manifest, missing: Sequence[str]) -> str:
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
