"""Reads and writes megatron-core's ``torch_dist`` checkpoints, as ``dist_checkpointing`` saves a GPTModel's weights.

A tensor has one name for all layers, with the layer as its first dimension and the expert as its second, or, where
layers differ, one name per layer. Norms before a linear layer carry TransformerEngine's names under either spec.
torch.distributed.checkpoint writes and describes them; no process group is needed, nor is megatron-core.
"""

import functools
import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hetero.checkpoint.interchange.megatron_folder import BACKENDS, find_torch_dist
from hetero.checkpoint.interchange.metadata_pickle import PortableProperties, read_metadata
from hetero.checkpoint.interchange.weights import WeightSource, new_folder
from hetero.checkpoint.manifest import Region, index_within, overlap
from hetero.errors import CheckpointError
from hetero.runtime.dtypes import PRECISIONS
from hetero.spec.model import MAX_VOCABULARY_DIVISOR, ModelSpec
from hetero.spec.parameters import EMBEDDING, Parameter, parameters

_FUSED_NORMS = (
    (re.compile(r"^input_layernorm\."), "self_attention.linear_qkv.layer_norm_"),
    (re.compile(r"^pre_mlp_layernorm\."), "mlp.linear_fc1.layer_norm_"),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")

_OF_THE_MODEL = re.compile(r"(embedding|decoder|output_layer|mtp)\.(?!.*_extra_state).*")
"""Tensors of the model itself; those of the optimizer and of random number generators have other prefixes."""

_EXTRA_STATES = re.compile(r".*(linear_(?:qkv|proj|fc1|fc2))\.weight")

_UNREADABLE = (
    *(OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, EOFError, OverflowError),
    *(NotImplementedError, pickle.UnpicklingError, zipfile.BadZipFile),
)
"""What a damaged part makes zipfile and torch.load raise."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter is: the name of a tensor, and its index along that tensor's first dimensions."""

    key: str
    index: tuple[int, ...]


class TorchDistSource:
    """The weights of a ``torch_dist`` folder, or of the newest in a folder of Megatron-LM's.

    Megatron-LM pads the vocabulary to a multiple of its divisor times tp, here it is padded as ``model`` says. The rows
    of tokens are the same; those of padding, which no token has, are cut off or filled up with zeros.

    Args:
        model: the model that was saved; these checkpoints do not describe it. Its padded vocabulary may be another.

    Attributes:
        notes: what the user should know of how the folder was read, one sentence each.

    Raises:
        CheckpointError: another layout or model, or not safe to read.
    """

    def __init__(self, folder: Path, *, model: ModelSpec) -> None:
        self._folder = find_torch_dist(folder)
        self._metadata = read_metadata(self._folder / ".metadata")
        self.model = model
        self._places = {each.name: self._find(each) for each in parameters(model)}
        self._check_that_all_is_used()
        self._check_sizes()
        self.notes = self._padding_notes()
        self.step = _step_of(self._folder)
        found = {self._stored(place.key).properties.dtype for place in self._places.values()}
        self.dtype = functools.reduce(torch.promote_types, found)
        if self.dtype not in PRECISIONS:
            raise CheckpointError(f"{self._folder}: weights are {self.dtype}; only {', '.join(map(str, PRECISIONS))}")

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor of a parameter in ``dtype``."""
        place = self._places[parameter.name]
        stored = self._stored(place.key)
        # Padding rows that the checkpoint does not have stay zero.
        whole = torch.zeros((1,) * len(place.index) + parameter.shape, dtype=dtype)
        target = whole[: stored.size[0]] if parameter.is_word_embedding_or_output else whole
        wanted = Region(offsets=place.index + (0,) * len(parameter.shape), shape=tuple(target.shape))
        num_found = 0
        for chunk in stored.chunks:
            saved = Region(offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes))
            if (edges := overlap(saved, wanted)) is not None:
                part = self._read(place.key, saved)
                target[index_within(edges, wanted.offsets)] = part[index_within(edges, saved.offsets)].to(dtype)
                num_found += math.prod(end - start for start, end in edges)
        if num_found != target.numel():
            raise CheckpointError(f"{self._folder}: {place.key} has {num_found} of {target.numel()} elements wanted")
        return whole.view(parameter.shape)

    def _read(self, key: str, saved: Region) -> torch.Tensor:
        """A part as it was saved."""
        info = self._metadata.storage_data.get(MetadataIndex(key, torch.Size(saved.offsets)))
        if info is None:
            raise CheckpointError(f"{self._folder}: {key} at {list(saved.offsets)} is in no file")
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                content = file.read(info.length)
            _check_archive(content)
            part: object = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise CheckpointError(f"{path}: {key} cannot be read: {error}") from None
        if not (
            isinstance(part, torch.Tensor)
            and (part.layout, part.device.type) == (torch.strided, "cpu")
            and (tuple(part.shape), part.dtype) == (saved.shape, self._stored(key).properties.dtype)
        ):
            raise CheckpointError(f"{path}: what is said to be {key} is something else")
        return part

    def _check_that_all_is_used(self) -> None:
        """Refuse a checkpoint with layers, experts or tensors that the model does not have: they would be lost."""
        used: dict[str, set[tuple[int, ...]]] = {}
        for place in self._places.values():
            used.setdefault(place.key, set()).add(place.index)
        for key, stored in self._metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata) or not _OF_THE_MODEL.fullmatch(key):
                continue
            if key not in used:
                raise CheckpointError(
                    f"{self._folder}: {key} is no part of the model that --model describes, and would be lost; is "
                    "--model the model that was saved?"
                )
            stacked = tuple(stored.size[: len(next(iter(used[key])))])
            if math.prod(stacked) != len(used[key]):
                raise CheckpointError(
                    f"{self._folder}: {key} holds {' x '.join(map(str, stacked))} layers or experts, --model has "
                    f"{len(used[key])}; is --model the model that was saved?"
                )

    def _padding_notes(self) -> tuple[str, ...]:
        stored, rows = self._stored(self._places[EMBEDDING].key).size[0], self.model.padded_vocab_size
        if stored == rows:
            return ()
        change = f"{stored - rows:,} are cut off" if stored > rows else f"{rows - stored:,} rows of zeros are added"
        return (
            f"{self._folder}: the vocabulary of {self.model.vocab_size:,} tokens is padded to {stored:,} rows in the "
            f"checkpoint and to {rows:,} here (--make-vocab-size-divisible-by): {change}, which no token has",
        )

    def _check_sizes(self) -> None:
        """Are the parts as large as their tensors, and their files as large as the parts? No part is read for that."""
        for key in {place.key for place in self._places.values()}:
            stored = self._stored(key)
            for chunk in stored.chunks:
                info = self._metadata.storage_data.get(MetadataIndex(key, torch.Size(chunk.offsets)))
                if info is None:
                    raise CheckpointError(f"{self._folder}: {key} at {list(chunk.offsets)} is in no file")
                path = self._folder / info.relative_path
                if not path.is_file():
                    raise CheckpointError(f"{path}: no such file, and {key} should be in it")
                size_bytes = path.stat().st_size
                num_bytes = math.prod(chunk.sizes) * stored.properties.dtype.itemsize
                if info.offset + info.length > size_bytes or num_bytes > info.length:
                    raise CheckpointError(
                        f"{path}: it has {size_bytes:,} bytes, and should have {num_bytes:,} of {key} in bytes "
                        f"{info.offset:,} to {info.offset + info.length:,}; is the file complete?"
                    )
            num_saved, num_wanted = sum(math.prod(chunk.sizes) for chunk in stored.chunks), math.prod(stored.size)
            if num_saved != num_wanted:
                raise CheckpointError(f"{self._folder}: {key} has {num_saved} of {num_wanted} elements")

    def _stored(self, key: str) -> TensorStorageMetadata:
        stored = self._metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    def _find(self, parameter: Parameter) -> _Place:
        places = _places(parameter.name)
        for place in places:
            stored = self._metadata.state_dict_metadata.get(place.key)
            if not isinstance(stored, TensorStorageMetadata):
                continue
            stacked, shape = tuple(stored.size[: len(place.index)]), tuple(stored.size[len(place.index) :])
            if parameter.is_word_embedding_or_output and shape[1:] == parameter.shape[1:]:
                self._check_padding(place.key, shape[0])
                return place
            if shape != parameter.shape or any(i >= n for i, n in zip(place.index, stacked, strict=True)):
                raise CheckpointError(
                    f"{self._folder}: {place.key} has shape {list(stored.size)}; the model needs "
                    f"{list(parameter.shape)} at index {list(place.index)} of it. Is --model the model that was saved?"
                )
            return place
        raise CheckpointError(f"{self._folder}: no {places[0].key}; is --model the model that was saved?")

    def _check_padding(self, key: str, rows: int) -> None:
        """Check that ``rows`` of the vocabulary are those of the model's tokens with padding."""
        tokens, padded = self.model.vocab_size, self.model.padded_vocab_size
        if rows < tokens:
            raise CheckpointError(
                f"{self._folder}: {key} has {rows:,} rows, and --model a vocabulary of {tokens:,} tokens; is --model "
                "the model that was saved?"
            )
        if max(rows, padded) - min(rows, padded) >= MAX_VOCABULARY_DIVISOR:
            raise CheckpointError(
                f"{self._folder}: {key} has {rows:,} rows, and --model {tokens:,} tokens in {padded:,} rows, which "
                f"differs by more than padding does (below {MAX_VOCABULARY_DIVISOR:,} rows); is --model the model that "
                "was saved?"
            )


def write_torch_dist(source: WeightSource, output: Path, *, dtype: torch.dtype) -> None:
    """Write a folder that ``megatron.core.dist_checkpointing.load`` fills a GPTModel of the local layer spec from.

    Holds a few tensors in memory at a time.

    Raises:
        CheckpointError: ``output`` exists.
    """
    model = source.model
    stacked: dict[str, list[tuple[_Place, Parameter]]] = {}
    extra_states: dict[str, list[None]] = {}
    for parameter in parameters(model):
        place = _places(parameter.name)[0]
        stacked.setdefault(place.key, []).append((place, parameter))
        if name := _extra_state(model, place):
            extra_states[name] = [None]
    tensors = {
        key: _StackedTensor(source, dtype, key, {place.index: parameter for place, parameter in parts})
        for key, parts in stacked.items()
    }
    with new_folder(output) as folder:
        dcp.save(
            {**tensors, **extra_states},
            # Copying ahead is for GPUs; it would hold tensors that are not written yet.
            storage_writer=_PortableWriter(folder, per_thread_copy_ahead=0),
            planner=_SavePlanner(),
            no_dist=True,
        )
        torch.save({"iteration": source.step, "checkpoint_version": 3.0}, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(dict(BACKENDS)))


def _places(name: str) -> list[_Place]:
    """Where a parameter can be, the place that we write it to first."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return [_Place(name, ())]
    layer, own = int(match[1]), match[2]
    index: tuple[int, ...] = ()
    if expert := _EXPERT.fullmatch(own):
        index, own = (int(expert[1]),), f"mlp.experts.experts.{expert[2]}"
    fused = own
    for pattern, replacement in _FUSED_NORMS:
        fused = pattern.sub(replacement, fused)
    return [
        place
        for each in dict.fromkeys((fused, own))
        for place in (
            _Place(f"decoder.layers.{each}", (layer, *index)),
            _Place(f"decoder.layers.{layer}.{each}", index),
        )
    ]


def _extra_state(model: ModelSpec, place: _Place) -> str | None:
    """The name of the (empty) extra state that megatron-core's linear layers save beside their weight."""
    if not _EXTRA_STATES.fullmatch(place.key):
        return None
    sizes = (model.num_layers, model.num_experts or 0)[: len(place.index)]
    index, shape = ".".join(map(str, place.index)), ".".join(map(str, sizes))
    return f"{place.key.removesuffix('weight')}_extra_state/shard_{index}_{shape}"


class _StackedTensor:
    """A tensor that torch.distributed.checkpoint writes part by part, each read from its source only then."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, key: str, parts: dict[tuple[int, ...], Parameter]
    ) -> None:
        self._source, self._dtype, self._key, self._parts = source, dtype, key, parts
        self._stacked = tuple(max(column) + 1 for column in zip(*parts, strict=True))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=self._dtype))
        items = []
        for index, parameter in self._parts.items():
            chunk = _chunk(index, parameter.shape)
            size = torch.Size((*self._stacked, *parameter.shape))
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            item = WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
            items.append(item)
        return items

    def read_part(self, index: MetadataIndex) -> torch.Tensor:
        """The part at the offset that ``index`` gives."""
        assert index.offset is not None
        at = tuple(index.offset[: len(self._stacked)])
        tensor = self._source.tensor(self._parts[at], self._dtype)
        return tensor.view((1,) * len(at) + tuple(tensor.shape))


class _PortableWriter(dcp.FileSystemWriter):
    """Writes the folder's name into the metadata as text: only Python 3.13 reads the paths that it has pickled."""

    @property
    def checkpoint_id(self) -> str:
        return str(super().checkpoint_id)


class _SavePlanner(dcp.DefaultSavePlanner):
    """Reads a part when it is about to be written, and not before; describes all parts for any version of torch."""

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        plans, described = super().create_global_plan(all_plans)
        for stored in described.state_dict_metadata.values():
            if isinstance(stored, TensorStorageMetadata):
                stored.properties = PortableProperties(**vars(stored.properties))
        return plans, described

    def lookup_object(self, index: MetadataIndex) -> object:
        found = self.state_dict[index.fqn]
        return found.read_part(index) if isinstance(found, _StackedTensor) else found


def _chunk(index: Sequence[int], shape: Sequence[int]) -> ChunkStorageMetadata:
    offsets = torch.Size((*index, *(0 for _ in shape)))
    return ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((*(1 for _ in index), *shape)))


def _check_archive(content: bytes) -> None:
    """Check what ``torch.save`` wrote: torch does not look at its checksums, and would inflate what is compressed.

    Raises:
        ValueError: it is damaged, or larger than its bytes.
        zipfile.BadZipFile: it is none.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch.save does not do")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of {damaged} is wrong: damaged")


def _step_of(folder: Path) -> int:
    match = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else 0
