"""Reads the ``.metadata`` of a torch.distributed checkpoint, which is a pickle, without running what it says.

A pickle is a program that may import, call and change anything. Here it may make records of a short list of types of
torch.distributed.checkpoint, which do nothing but hold numbers and names, and fill in those that it has made. At
another name, instruction or change it is refused.
"""

import dataclasses
import gc
import io
import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

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

_DAMAGE = (
    *(EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, struct.error),
)
"""What a damaged pickle, or a record without one of its fields, makes the unpickler and the checks raise."""

_MAX_DIMENSIONS = 32
"""Of a tensor. A tuple that is shared many times costs a few bytes in a pickle, and its whole length at every look."""

_FILLED_IN = frozenset(
    record for record in _ALLOWED.values() if isinstance(record, type) and dataclasses.is_dataclass(record)
)
"""Types of which a pickle makes instances without their constructor, and then sets what they hold."""

_INSTRUCTIONS = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    }
)
"""What pickles of protocols 4 and 5, which torch writes, need for records, lists, dicts, tuples, texts and numbers.

Not among them: objects that some other library has registered, whatever reserves room before it reads, and sets.
"""


class _Instructions(dict[int, Callable[[Any], None]]):
    """What is done for each instruction."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it has the instruction 0x{code:02x}")


class _RecordUnpickler(pickle._Unpickler):
    """Python's own unpickler, the one written in Python: its instructions can be chosen and looked at."""

    dispatch = _Instructions(
        {
            ord(opcode.code): pickle._Unpickler.dispatch[ord(opcode.code)]
            for opcode in pickletools.opcodes
            if opcode.name in _INSTRUCTIONS
        }
    )

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> object:
        """Return the record of this name; any other name is refused."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ALLOWED[module, name]

    def load_build(self) -> None:
        """Set what an instance holds. Types, functions and members of an enumeration belong to the whole process."""
        state = self.stack.pop()
        record = self.stack[-1]
        if type(record) not in _FILLED_IN:
            raise pickle.UnpicklingError(f"it changes {_shown(record)}")
        if type(record) is PortableProperties:
            PortableProperties.__setstate__(record, state)
        elif type(state) is dict:
            vars(record).update(state)
        else:
            raise pickle.UnpicklingError(f"it fills in {_shown(record)} from {_shown(state)}")

    def load_setitem(self) -> None:
        """Set one entry of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        """Set entries of a dict."""
        self._set_items(self.pop_mark())

    def _set_items(self, keys_and_values: list[Any]) -> None:
        for key in keys_and_values[::2]:
            if type(key) is not str and not _is_index(key):
                raise pickle.UnpicklingError(f"it has {_shown(key)} for a key")
        self.stack[-1].update(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which goes through all records again and again, a third of the time to make them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_index(key: Any) -> bool:
    """Return whether a key is the place of a part. To hash tuples that hold one another can take for ever."""
    if type(key) is not metadata.MetadataIndex or type(key.fqn) is not str:
        return False
    return key.offset is None or (type(key.offset) is torch.Size and len(key.offset) <= _MAX_DIMENSIONS)


def _shown(value: object) -> str:
    """Return a number or text as it is written, of anything else only its type: lists may hold one another."""
    return repr(value) if isinstance(value, int | str) else f"a {type(value).__name__}"


def read_metadata(path: Path) -> Metadata:
    """The metadata in ``path``, with every data file in its folder.

    Raises:
        CheckpointError: missing or damaged; it names anything that could run, or a file elsewhere.
    """
    try:
        # From memory: what is not in the file cannot be asked for, however long a text says that it is.
        content = read_bytes(path)
        with _without_garbage_collection():
            value = _RecordUnpickler(io.BytesIO(content)).load()
        return _checked(path, value, max_blocks=len(content))
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused: {error}. Checkpoint metadata has no use for that; do not trust it"
        ) from None
    except CheckpointError:
        raise
    except _DAMAGE as error:
        # Records are made without their constructors, so that any of their fields may be missing.
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def _checked(path: Path, value: object, *, max_blocks: int) -> Metadata:
    if not isinstance(value, Metadata):
        raise CheckpointError(f"{path}: it holds {_shown(value)}, not a checkpoint's metadata")
    for info in value.storage_data.values():
        name = info.relative_path
        if not isinstance(name, str) or not _DATA_FILE.fullmatch(name):
            raise CheckpointError(f"{path}: refused: {_shown(name)} is not a .distcp file of this folder")
        if not _are_sizes((info.offset, info.length)):
            raise CheckpointError(f"{path}: refused: a part of {name} begins at {_shown(info.offset)}")
        if transforms := getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path}: transformed data ({_shown(transforms)}) is not supported")
    num_blocks = 0
    for key, stored in value.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        if not isinstance(stored.properties.dtype, torch.dtype):
            raise CheckpointError(f"{path}: refused: {key} has the type {_shown(stored.properties.dtype)}")
        # A list that is shared costs its length for each tensor that has it.
        num_blocks += len(stored.chunks)
        if num_blocks > max_blocks:
            raise CheckpointError(f"{path}: refused: it counts more blocks than it has bytes ({max_blocks:,})")
        if not _is_cut_into_blocks(stored):
            raise CheckpointError(f"{path}: refused: {key} is not cut into blocks")
    return value


def _is_cut_into_blocks(stored: TensorStorageMetadata) -> bool:
    num_dimensions = len(stored.size)
    return (
        num_dimensions <= _MAX_DIMENSIONS
        and _are_sizes(stored.size)
        and all(
            len(chunk.offsets) == len(chunk.sizes) == num_dimensions
            and _are_sizes(chunk.offsets)
            and _are_sizes(chunk.sizes)
            for chunk in stored.chunks
        )
    )


def _are_sizes(numbers: Iterable[object]) -> bool:
    return all(type(each) is int and 0 <= each < 2**63 for each in numbers)
