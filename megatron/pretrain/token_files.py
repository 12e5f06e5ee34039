"""Reads token files and their indices range by range, where megatron-core maps them into memory.

A mapped file that somebody cuts, or whose disk fails, ends its readers by SIGBUS, in whatever line they are. A read
that comes back short is an error that names the file.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from hetero.errors import DataError
from megatron.pretrain.core_datasets import GPTDataset, IndexedDataset
from megatron.pretrain.corpus_index import HEADER_BYTES


class DataFile:
    """A file of training data that stays open.

    Args:
        name: what messages call it, where it is only built at ``path``.
        size: bytes that it has to have.
    """

    def __init__(self, path: Path, *, name: Path, size: int) -> None:
        self._name = name
        self._size = size
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Return ``num_bytes`` bytes from ``offset`` on.

        Raises:
            DataError: the file ends before, or cannot be read.
        """
        try:
            # Needs no position, which forks share.
            data = os.pread(self._descriptor, num_bytes, offset)
            if len(data) == num_bytes:
                return data
            now = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._unreadable(error) from error
        raise DataError(
            f"{self._name}: {now} bytes now, its index counts {self._size}; it was cut or written again while it was "
            "read: restore it and go on from the last checkpoint"
        )

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"{self._name}: cannot be read any more: {error.strerror}; look after its disk or network, and go on from "
            "the last checkpoint"
        )


class FileArray:
    """Rows of an array in a file, read one by one. ``shape`` is that of the array."""

    def __init__(self, file: DataFile, *, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> None:
        self.shape = shape
        self._file = file
        self._dtype = dtype
        self._offset = offset
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:]))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = np.frombuffer(self._file.read(self._row_bytes, self._offset + int(index) * self._row_bytes), self._dtype)
        return row if len(self.shape) > 1 else row[0]


class _TokenReader:
    """Takes the place of megatron-core's readers of ``.bin`` files: one maps it, the other accepts short reads."""

    def __init__(self, file: DataFile) -> None:
        self._file = file

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray:
        """Return ``count`` tokens from byte ``offset`` on."""
        wanted = np.dtype(dtype)
        return np.frombuffer(self._file.read(int(count) * wanted.itemsize, int(offset)), wanted)


def read_from_files(dataset: GPTDataset, cache: Path | None) -> GPTDataset:
    """Let ``dataset``, just built, read its samples from files that it has mapped until now; returns it.

    Args:
        cache: folder in which its index files are found later on.

    Raises:
        DataError: a file cannot be opened.
        ValueError: an index has another shape than megatron-core writes.
    """
    if isinstance(dataset.dataset, IndexedDataset):
        _read_corpus_from_files(dataset.dataset)
    for name, row_shape in (("document_index", ()), ("sample_index", (2,)), ("shuffle_index", ())):
        array = getattr(dataset, name)
        if array.shape[1:] != row_shape:
            raise ValueError(f"{name} has the shape {array.shape}")
        if isinstance(array, np.memmap) and cache is not None:
            path = Path(str(array.filename))
            file = DataFile(path, name=cache / path.name, size=array.offset + array.nbytes)
            setattr(dataset, name, FileArray(file, dtype=array.dtype, shape=array.shape, offset=array.offset))
    return dataset


def _read_corpus_from_files(corpus: IndexedDataset) -> None:
    index, num_sequences = corpus.index, len(corpus)
    size = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    data, path = Path(corpus.path_prefix + ".bin"), Path(corpus.path_prefix + ".idx")
    corpus.bin_reader = _TokenReader(DataFile(data, name=data, size=size))
    file = DataFile(path, name=path, size=path.stat().st_size)
    pointers_at = HEADER_BYTES + 4 * num_sequences
    for name, dtype, offset in (("lengths", np.int32, HEADER_BYTES), ("pointers", np.int64, pointers_at)):
        rows = FileArray(file, dtype=np.dtype(dtype), shape=(num_sequences,), offset=offset)
        setattr(index, f"sequence_{name}", rows)
