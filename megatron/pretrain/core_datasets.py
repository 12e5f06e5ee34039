"""megatron-core's datasets, imported so that they read arrays of whole numbers and nothing else.

They load sample indices with ``numpy.load(..., allow_pickle=True)``: a file that is a pickle would run what it says, in
every rank. Here their ``numpy`` is one whose ``load`` never unpickles. This is the one module that imports them.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from hetero.runtime.version_differences import READS_FOR_DATASETS

with warnings.catch_warnings():
    # It warns of every optional package that is not installed.
    warnings.simplefilter("ignore")
    from megatron.core.datasets.blended_dataset import BlendedDataset as BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset as GPTDataset
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig as GPTDatasetConfig
    from megatron.core.datasets.gpt_dataset import MockGPTDataset as MockGPTDataset
    from megatron.core.datasets.indexed_dataset import DType as DType
    from megatron.core.datasets.indexed_dataset import IndexedDataset as IndexedDataset


class _NumpyWithoutPickles:
    """numpy, but for its ``load``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def load(self, file: str, **_: object) -> np.memmap[Any, Any]:
        """Map an array of whole numbers from an ``.npy`` file, whatever options the caller gives.

        Raises:
            ValueError: the file is damaged or holds something else, such as a pickle or an archive of arrays.
            OSError: the file cannot be read.
        """
        try:
            # numpy.load looks for archives and pickles first; this knows nothing but arrays.
            array = np.lib.format.open_memmap(file, mode="r")
        except (ValueError, TypeError, OverflowError) as error:
            # numpy's own text says how to load the file unsafely.
            raise ValueError(f"{Path(file).name} is damaged, or no array of numbers") from error
        if array.dtype.kind not in "iu" or not array.flags.c_contiguous:
            raise ValueError(f"{Path(file).name} is no array of whole numbers, row by row")
        return array


def _refuse_pickles() -> None:
    for name, module in list(sys.modules.items()):
        reads_for_datasets = name.startswith("megatron.core.datasets.") or name in READS_FOR_DATASETS
        if reads_for_datasets and getattr(module, "numpy", None) is np:
            module.numpy = _NumpyWithoutPickles()  # type: ignore[attr-defined]  # each imports numpy by this name


_refuse_pickles()
