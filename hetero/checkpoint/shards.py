"""Writes and reads shard files: safetensors, of which every block is checked by its checksum."""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero.checkpoint.folder import fsync
from hetero.checkpoint.manifest import FloatType, RankTensor, SavedBlock, Shard, TensorInfo
from hetero.errors import CheckpointError
from hetero.runtime.sharded_state import TensorSlice

DTYPE_OF: dict[FloatType, torch.dtype] = {name: getattr(torch, name) for name in get_args(FloatType)}
"""Manifests have torch's own names."""

_FLOAT_TYPE_OF = {dtype: name for name, dtype in DTYPE_OF.items()}

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads at most."""


def write_shard(
    path: Path,
    slices: Sequence[TensorSlice],
    *,
    rank: int | None,
    rank_state: Mapping[str, torch.Tensor] | None = None,
) -> Shard:
    """Write contiguous host tensors to a new file and wait until it is on the disk.

    Raises:
        CheckpointError: the file system refused.
    """
    tensors, blocks, rank_tensors = {}, [], []
    for each in slices:
        block = SavedBlock(
            name=each.name, offsets=each.offsets, shape=tuple(each.tensor.shape), crc32=_crc32(each.tensor)
        )
        assert block.key not in tensors, f"rank {rank} saves {block.key} twice"
        blocks.append(block)
        tensors[block.key] = each.tensor
    for name, tensor in (rank_state or {}).items():
        rank_tensor = RankTensor(name=name, crc32=_crc32(tensor))
        rank_tensors.append(rank_tensor)
        tensors[rank_tensor.key] = tensor
    try:
        save_file(tensors, path)
        # safetensors makes files private to the user; whoever may read the folder may read the shard.
        path.chmod(path.parent.stat().st_mode & 0o666)
        fsync(path)
        return Shard(
            file=path.name,
            size_bytes=path.stat().st_size,
            header_crc32=_header_crc32(path),
            boxes=tuple(blocks),
            rank=rank,
            rank_state=tuple(rank_tensors),
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}; is the disk full?") from None


def tensor_infos(slices: Iterable[TensorSlice]) -> dict[str, TensorInfo]:
    """The global tensors that ``slices`` are of."""
    return {each.name: TensorInfo(shape=each.shape, dtype=_FLOAT_TYPE_OF[each.tensor.dtype]) for each in slices}


def check_shard(checkpoint: Path, shard: Shard) -> None:
    """Check that a shard is there, has its whole length, and an undamaged header.

    Raises:
        CheckpointError: it is missing, truncated or damaged.
    """
    path = checkpoint / shard.file
    if not path.is_file():
        raise CheckpointError(
            f"{path}: shard missing; the folder has to be on a file system that all hosts see, with all its files"
        )
    try:
        size_bytes = path.stat().st_size
        header_crc32 = _header_crc32(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if size_bytes != shard.size_bytes:
        raise CheckpointError(f"{path}: it has {size_bytes} bytes, not {shard.size_bytes}: damaged; load another step")
    if header_crc32 != shard.header_crc32:
        raise CheckpointError(f"{path}: the checksum of its header is wrong: damaged; load another step")


def read_blocks(
    checkpoint: Path, shard: Shard, blocks: Sequence[SavedBlock]
) -> Iterator[tuple[SavedBlock, torch.Tensor]]:
    """Some blocks of a shard, one at a time, each verified before it is handed out.

    Call :func:`check_shard` first.

    Raises:
        CheckpointError: a block is damaged.
    """
    with _open(checkpoint, shard) as file:
        for block in blocks:
            tensor = _verified(checkpoint / shard.file, file, block.key, block.crc32)
            if tuple(tensor.shape) != block.shape:
                raise CheckpointError(f"{checkpoint / shard.file}: {block.key} has shape {list(tensor.shape)}")
            yield block, tensor


def read_rank_state(checkpoint: Path, shard: Shard) -> dict[str, torch.Tensor]:
    """What belongs to the rank that wrote the shard. Call :func:`check_shard` first.

    Raises:
        CheckpointError: it is damaged.
    """
    with _open(checkpoint, shard) as file:
        return {
            each.name: _verified(checkpoint / shard.file, file, each.key, each.crc32).clone()
            for each in shard.rank_state
        }


def _open(checkpoint: Path, shard: Shard) -> safe_open:
    path = checkpoint / shard.file
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None


def _verified(path: Path, file: safe_open, key: str, crc32: int) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(key)
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: {key} cannot be read: {error}") from None
    if _crc32(tensor) != crc32:
        raise CheckpointError(f"{path}: the checksum of {key} is wrong: damaged; load another step")
    return tensor


def _crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().flatten().view(torch.uint8).numpy().data)


def _header_crc32(path: Path) -> int:
    with path.open("rb") as file:
        length = file.read(8)
        # A length that is not to be trusted reads no further than a header can reach.
        return zlib.crc32(file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES)), zlib.crc32(length))
