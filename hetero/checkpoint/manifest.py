"""Lists which block of which global tensor lies in which shard file, and its checksum.

A block is a rectangular part of a tensor: ``[offset, offset + size)`` along each dimension.

A shard is a safetensors file. The manifest is the only index: a reader never looks for a file or a tensor that it
does not name, and it names files of the checkpoint's own folder only.

Checksums are CRC-32 (zlib), one per block and one per shard header, so that a rank reads and verifies only the blocks
that it needs. It finds every flipped byte, runs at 2.8 GiB/s where SHA-256 runs at 0.35 on a core without SHA
instructions, and lets go of Python's interpreter lock. It is no defence against a forger, and none is needed: what
a checkpoint holds is only ever read as numbers.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field

from hetero.errors import CheckpointError
from hetero.serialization import STRICT
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters

FloatType = Literal["float64", "float32", "bfloat16", "float16"]

_ITEM_BYTES: dict[FloatType, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors")


class HasEdges(Protocol):
    """A block of a global tensor: ``[offset, offset + size)`` along each dimension."""

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A block of a global tensor, wherever it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBlock:
    """A block of the global tensor ``name`` (``kind/canonical name``) in a shard."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int

    @property
    def key(self) -> str:
        """Its name within the safetensors file, as in ``exp_avg/output_layer.weight[0:32,0:16]``."""
        return block_key(self.name, self.offsets, self.shape)


def block_key(name: str, offsets: Sequence[int], shape: Sequence[int]) -> str:
    """The name of a block within its safetensors file."""
    edges = (f"{start}:{start + size}" for start, size in zip(offsets, shape, strict=True))
    return f"{name}[{','.join(edges)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTensor:
    """A tensor that belongs to a rank and not to the model, such as the state of its random number generator."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    crc32: int

    @property
    def key(self) -> str:
        """Its name within the safetensors file."""
        return f"rank_state/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file.

    header_crc32: of its first bytes up to the first tensor; header and blocks together are the whole file.
    boxes: its blocks, under the key that manifests have had from the first on.
    rank: who wrote it, ``None`` for a converter.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    file: str
    size_bytes: Annotated[int, Field(ge=0)]
    header_crc32: int
    boxes: tuple[SavedBlock, ...]
    rank: int | None = None
    rank_state: tuple[RankTensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A global tensor."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    shape: tuple[int, ...]
    dtype: FloatType


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All shards of a checkpoint, and the global tensors that their blocks add up to."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format_version: Literal[1] = 1
    tensors: dict[str, TensorInfo]
    shards: tuple[Shard, ...]

    def blocks(self) -> Iterator[tuple[Shard, SavedBlock]]:
        """Every block with its shard."""
        for shard in self.shards:
            for block in shard.boxes:
                yield shard, block


def merge(written: Sequence[tuple[Shard, dict[str, TensorInfo]]], model: ModelSpec) -> Manifest:
    """The manifest of shards that together hold, of each kind that they hold, every parameter of ``model``.

    Raises:
        CheckpointError: a parameter is missing or has another shape, or ranks disagree about a tensor.
    """
    tensors: dict[str, TensorInfo] = {}
    for shard, infos in written:
        for name, info in infos.items():
            if tensors.setdefault(name, info) != info:
                raise CheckpointError(
                    f"{name}: rank {shard.rank} saves it as {info}, an earlier rank as {tensors[name]}"
                )
    for kind in sorted({name.partition("/")[0] for name in tensors} | {"weights"}):
        for parameter in parameters(model):
            name = f"{kind}/{parameter.name}"
            found = tensors[name].shape if name in tensors else None
            if found != parameter.shape:
                raise CheckpointError(f"{name}: the model has shape {parameter.shape}, the ranks saved {found}")
    return Manifest(tensors=tensors, shards=tuple(shard for shard, _ in written))


def overlap(first: HasEdges, second: HasEdges) -> tuple[tuple[int, int], ...] | None:
    """The indices ``[start, end)`` that two blocks of one tensor share, per dimension; ``None`` if there are none."""
    edges = tuple(
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(first.offsets, first.shape, second.offsets, second.shape, strict=True)
    )
    return edges if all(start < end for start, end in edges) else None


def index_within(edges: tuple[tuple[int, int], ...], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """``edges`` of the global tensor as an index into a block of it that begins at ``offsets``."""
    return tuple(slice(start - offset, end - offset) for (start, end), offset in zip(edges, offsets, strict=True))


def check_manifest(manifest: Manifest, *, source: str) -> None:
    """Check that every file is in the checkpoint's folder, and that blocks tile their tensors and fit into their files.

    So no tensor is larger than the files, once these have the sizes that the manifest says.

    Raises:
        CheckpointError: they do not.
    """
    files = [shard.file for shard in manifest.shards]
    for file in files:
        if not _SHARD_NAME.fullmatch(file):
            raise CheckpointError(
                f"{source}: shard name {file!r} is not a plain file name ending in .safetensors; this manifest was not "
                "written by this program, do not use it"
            )
    if len(set(files)) != len(files):
        raise CheckpointError(f"{source}: it names a shard twice: {', '.join(sorted(files))}")
    blocks_of: dict[str, list[SavedBlock]] = {name: [] for name in manifest.tensors}
    for shard, block in manifest.blocks():
        if block.name not in blocks_of:
            raise CheckpointError(
                f"{source}: {shard.file} has a block of {block.name}, which is no tensor of the manifest"
            )
        blocks_of[block.name].append(block)
    for name, blocks in blocks_of.items():
        _check_tiling(name, manifest.tensors[name].shape, blocks, source)
    for shard in manifest.shards:
        block_bytes = sum(
            math.prod(block.shape) * _ITEM_BYTES[manifest.tensors[block.name].dtype] for block in shard.boxes
        )
        if block_bytes > shard.size_bytes:
            raise CheckpointError(
                f"{source}: the blocks of {shard.file} are {block_bytes:,} bytes, the file has {shard.size_bytes:,}; a "
                "shape, a type or a size in it is wrong"
            )


def _check_tiling(name: str, shape: tuple[int, ...], blocks: Sequence[SavedBlock], source: str) -> None:
    for block in blocks:
        if not _is_inside(block, shape):
            raise CheckpointError(
                f"{source}: a block of {name} at {list(block.offsets)} of shape {list(block.shape)} is not inside the "
                f"tensor's shape {list(shape)}"
            )
    # In ascending order, a block can only meet those that have not ended along the first dimension.
    reachable: list[SavedBlock] = []
    for block in sorted(blocks, key=lambda block: block.offsets):
        reachable = [other for other in reachable if other.offsets[0] + other.shape[0] > block.offsets[0]]
        for other in reachable:
            if overlap(block, other):
                raise CheckpointError(f"{source}: {block.key} overlaps {other.key}; each element must be saved once")
        reachable.append(block)
    saved, wanted = sum(math.prod(block.shape) for block in blocks), math.prod(shape)
    if saved != wanted:
        raise CheckpointError(f"{source}: {name} has {saved} of its {wanted} elements; no shard holds the rest")


def _is_inside(block: SavedBlock, shape: tuple[int, ...]) -> bool:
    if not len(block.offsets) == len(block.shape) == len(shape) > 0:
        return False
    edges = zip(block.offsets, block.shape, shape, strict=True)
    return all(offset >= 0 < size and offset + size <= whole for offset, size, whole in edges)
