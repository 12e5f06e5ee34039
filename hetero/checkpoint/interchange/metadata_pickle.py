"""Reads the ``.metadata`` of a torch.distributed checkpoint, which is a pickle, without running what it says.

A pickle is a program that may import and call anything. Here it may name a short list of plain record types of
torch.distributed.checkpoint, which do nothing but hold numbers and names; at the first other name it is refused.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hetero.errors import CheckpointError, ConfigError
from hetero.runtime.version_differences import PATH_MODULES, common_tensor_state
from hetero.serialization import read_bytes


class _Named(Protocol):
    """A class, or a function."""

    @property
    def __name__(self) -> str: ...


class PortableProperties(metadata.TensorProperties):
    """Properties of a tensor that are read from any version of torch, and written so that any version reads them."""

    def __setstate__(self, state: tuple[object, ...]) -> None:
        super().__setstate__(common_tensor_state(state))  # type: ignore[no-untyped-call]  # torch's own

    def __reduce__(self) -> tuple[object, ...]:
        state = self.__getstate__()  # type: ignore[no-untyped-call]  # torch's own
        return metadata.TensorProperties, (), common_tensor_state(state)


_RECORDS: dict[str, tuple[_Named, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
    ),
    "torch.distributed.checkpoint.filesystem": (filesystem._StorageInfo,),
    "torch.distributed.checkpoint.planner": (
        planner.BytesIOWriteData,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        planner.WriteItemType,
    ),
    "torch.serialization": (torch.serialization._get_layout,),
    "torch": (torch.Size,),
    **{module: (type(Path()),) for module in PATH_MODULES},
}

_ALLOWED: dict[tuple[str, str], object] = {
    (module, each.__name__): each for module, records in _RECORDS.items() for each in records
}
_ALLOWED[metadata.__name__, metadata.TensorProperties.__name__] = PortableProperties
_ALLOWED |= {
    ("torch", str(each).removeprefix("torch.")): each for each in vars(torch).values() if type(each) is torch.dtype
}

_DATA_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp")


class _RecordUnpickler(pickle.Unpickler):
    """Refuses every name that is not on the list."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ALLOWED[module, name]


def read_metadata(path: Path) -> Metadata:
    """The metadata in ``path``, with every data file in its folder.

    Raises:
        CheckpointError: missing or damaged; it names anything that could run, or a file elsewhere.
    """
    try:
        # From memory: what is not in the file cannot be asked for, however long a text says that it is.
        content = read_bytes(path)
        _check_memo(content)
        value = _RecordUnpickler(io.BytesIO(content)).load()
        return _checked(path, value)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused: {error}. Checkpoint metadata has no use for that; do not trust it"
        ) from None
    except CheckpointError:
        raise
    except (EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        # Records are made without their constructors, so that any of their fields may be missing.
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def _check_memo(content: bytes) -> None:
    """Check that no value is to be kept under a number beyond what a pickle of this size can count to.

    Python's unpickler fills a table up to that number, which four damaged bytes make 64 GB.

    Raises:
        ValueError: one is, or it is no pickle.
    """
    for opcode, number, _ in pickletools.genops(content):
        is_kept = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if is_kept and not (isinstance(number, int) and 0 <= number <= len(content)):
            raise ValueError(f"it keeps a value under the number {number}")


def _checked(path: Path, value: object) -> Metadata:
    if not isinstance(value, Metadata):
        raise CheckpointError(f"{path}: it holds a {type(value).__name__}, not a checkpoint's metadata")
    for info in value.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or not _DATA_FILE.fullmatch(name):
            raise CheckpointError(f"{path}: refused: {name!r} is not a .distcp file of this folder")
        if not _are_sizes((info.offset, info.length)):
            raise CheckpointError(f"{path}: refused: a part of {name} begins at {info.offset!r}")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path}: transformed data ({info.transform_descriptors}) is not supported")
    for key, stored in value.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise CheckpointError(f"{path}: refused: {key} has the type {stored.properties.dtype!r}")
        blocks = [(*chunk.offsets, *chunk.sizes) for chunk in stored.chunks]
        same = all(len(chunk.offsets) == len(chunk.sizes) == len(stored.size) for chunk in stored.chunks)
        if not same or not all(map(_are_sizes, (stored.size, *blocks))):
            raise CheckpointError(f"{path}: refused: {key} is not cut into blocks")
    return value


def _are_sizes(numbers: Iterable[object]) -> bool:
    return all(type(each) is int and 0 <= each < 2**63 for each in numbers)
