"""Writes and reads shard files: safetensors, of which every block is checked by its checksum.

Where their files lie, and what is in them, :mod:`.shard_files` knows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import torch
from isal import isal_zlib
from safetensors import SafetensorError
from safetensors.torch import save_file

from hetero.checkpoint.folder import fsync_in_parts
from hetero.checkpoint.manifest import FloatType, RankTensor, SavedBlock, Shard, TensorInfo
from hetero.checkpoint.shard_files import (
    MAX_RANK_STATE_BYTES,
    LocalShardFile,
    Place,
    ShardFile,
    checked_places,
    read_header,
)
from hetero.checkpoint.write_errors import write_error
from hetero.errors import CheckpointError
from hetero.file_systems import let_readers_of_folder_read
from hetero.runtime.sharded_state import TensorSlice
from hetero.units import MIB

DTYPE_OF: dict[FloatType, torch.dtype] = {name: getattr(torch, name) for name in get_args(FloatType)}
"""Manifests have torch's own names."""

_FLOAT_TYPE_OF = {dtype: name for name, dtype in DTYPE_OF.items()}

DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
"""What safetensors calls the types of training state."""

_DTYPE_OF_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}

_MAX_RUN_BYTES = 32 * MIB
"""Blocks that lie behind one another are read at once, up to so much: more makes a request no cheaper."""

_MAX_GAP_BYTES = MIB // 16
"""Of bytes between two blocks that are read although nobody wants them: another request takes longer."""


def write_shard(
    path: Path,
    slices: Sequence[TensorSlice],
    *,
    rank: int | None,
    rank_state: Mapping[str, torch.Tensor] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Shard:
    """Write contiguous host tensors to a new file and wait until it is on the disk.

    Args:
        advance: called whenever a part of the work is done.

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
        advance()
    for name, tensor in (rank_state or {}).items():
        rank_tensor = RankTensor(name=name, crc32=_crc32(tensor))
        rank_tensors.append(rank_tensor)
        tensors[rank_tensor.key] = tensor
    try:
        save_file(tensors, path)
        # safetensors makes files private to the user; whoever may read the folder may read the shard.
        let_readers_of_folder_read(path)
        fsync_in_parts(path, advance)
        return Shard(
            file=path.name,
            size_bytes=path.stat().st_size,
            header_crc32=isal_zlib.crc32(read_header(LocalShardFile(path), path.stat().st_size)),
            boxes=tuple(blocks),
            rank=rank,
            rank_state=tuple(rank_tensors),
        )
    except (OSError, SafetensorError) as error:
        raise write_error(path.parent, error) from None


def tensor_infos(slices: Iterable[TensorSlice]) -> dict[str, TensorInfo]:
    """The global tensors that ``slices`` are of."""
    return {each.name: TensorInfo(shape=each.shape, dtype=_FLOAT_TYPE_OF[each.tensor.dtype]) for each in slices}


class ShardReader:
    """Reads blocks of one shard, wherever its file lies; what it hands out has been verified.

    Args:
        shard: what the file should be.
    """

    def __init__(self, file: ShardFile, shard: Shard) -> None:
        self._file = file
        self._shard = shard
        self._places: Mapping[str, Place] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def check(self) -> None:
        """Check that the file is there, has its whole length, and an undamaged header.

        Raises:
            CheckpointError: it is missing, truncated or damaged.
        """
        if self._places is None:
            self._places = checked_places(self._file, self._shard)

    def blocks(self, blocks: Sequence[SavedBlock]) -> Iterator[tuple[SavedBlock, torch.Tensor]]:
        """Read some blocks, one at a time; each tensor is good until the next is asked for.

        Raises:
            CheckpointError: the file, or a block of it, is missing or damaged.
        """
        by_key = {block.key: block for block in blocks}
        places = self._places_of(by_key)
        for key, block in by_key.items():
            if (shape := places[key].shape) != block.shape:
                raise CheckpointError(f"{self._file.where}: {key} has shape {list(shape)}: damaged; load another step")
        for key, tensor in self._tensors(places, {key: block.crc32 for key, block in by_key.items()}):
            yield by_key[key], tensor

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Read what belongs to the rank that wrote the shard.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        names = {each.key: each.name for each in self._shard.rank_state}
        places = self._places_of(names)
        if (num_bytes := sum(place.end - place.start for place in places.values())) > MAX_RANK_STATE_BYTES:
            raise CheckpointError(
                f"{self._file.where}: the state of one rank has {num_bytes:,} bytes, at most {MAX_RANK_STATE_BYTES:,} "
                "are read: damaged; load another step"
            )
        found = self._tensors(places, {each.key: each.crc32 for each in self._shard.rank_state})
        return {names[key]: tensor.clone() for key, tensor in found}

    def _places_of(self, keys: Iterable[str]) -> dict[str, Place]:
        """Find where the tensors of these keys lie, whose sizes nobody has compared with anything yet."""
        self.check()
        assert self._places is not None, "checked"
        places = {}
        for key in keys:
            if key not in self._places:
                raise CheckpointError(f"{self._file.where}: {key} cannot be read: the file has no tensor of that name")
            places[key] = self._places[key]
        return places

    def _tensors(self, places: Mapping[str, Place], crc32_of: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Read tensors, verified by their checksums, in the order of the file."""
        for run in _runs(sorted(places.items(), key=lambda each: each[1].start)):
            start = run[0][1].start
            buffer = self._read(start, run[-1][1].end)
            for key, place in run:
                values = buffer[place.start - start : place.end - start]
                if _crc32(values) != crc32_of[key]:
                    raise CheckpointError(
                        f"{self._file.where}: the checksum of {key} is wrong: damaged; load another step"
                    )
                yield key, values.view(_DTYPE_OF_CODE[place.code]).view(place.shape)

    def _read(self, start: int, end: int) -> torch.Tensor:
        """Read bytes of the file into a buffer that the next read uses again."""
        if self._buffer.numel() < end - start:
            self._buffer = torch.empty(end - start, dtype=torch.uint8)
        buffer = self._buffer[: end - start]
        self._file.read_into(buffer.numpy().data, start=start)
        return buffer


def _runs(places: Sequence[tuple[str, Place]]) -> Iterator[list[tuple[str, Place]]]:
    """Group places, in ascending order, into stretches of the file that are read at once."""
    run: list[tuple[str, Place]] = []
    for key, place in places:
        if run:
            start, end = run[0][1].start, run[-1][1].end
            is_near = end <= place.start <= end + _MAX_GAP_BYTES and place.end - start <= _MAX_RUN_BYTES
            if not is_near or (place.start - start) % place.item_bytes:
                yield run
                run = []
        run.append((key, place))
    if run:
        yield run


def _crc32(tensor: torch.Tensor) -> int:
    return isal_zlib.crc32(tensor.detach().flatten().view(torch.uint8).numpy().data)
