"""Identifies the data of a run: digests of the token files, and of the order in which samples are drawn from them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hetero.checkpoint.state import DataState
from hetero.printable import encodable
from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.core_datasets import BlendedDataset
from megatron.pretrain.corpus_index import read_index_header
from megatron.pretrain.data import SampleDataset, Split, find_blend

_HEAD_BYTES = 2**20
"""Of each file that the digest of its content reads; the sizes stand for the rest."""

_HEAD_ROWS = 1024
"""Of each index that the digest of the order reads: a random order is known by its beginning."""


def describe_data(config: DataConfig, dataset: SampleDataset, *, split: Split) -> DataState:
    """Describe the data of ``split``, of which ``dataset`` was built. Reads 2 MiB per corpus.

    The order depends on how often the run goes through each corpus, and on whether megatron-core shuffles the last time
    by itself, but not on the number of samples otherwise: runs of other lengths may have the same one.

    Raises:
        ConfigError: a file is missing.
    """
    blend = find_blend(config, split)
    if blend is None:
        return DataState(order=_order_digest(dataset))
    own = {"train": config.train_data_path, "valid": config.valid_data_path, "test": config.test_data_path}
    return DataState(
        paths=tuple(map(encodable, config.data_path or own[split])),
        split=config.split if config.data_path else "",
        content=_content_digest(blend.prefixes),
        order=_order_digest(dataset),
    )


def _content_digest(prefixes: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for prefix in prefixes:
        header = read_index_header(prefix)
        for path in (header.index, header.data):
            digest.update(f"{path.stat().st_size} ".encode())
            digest.update(_head(path))
    return digest.hexdigest()[:16]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _order_digest(dataset: Any) -> str:
    blended = isinstance(dataset, BlendedDataset)
    digest = hashlib.sha256(repr(list(dataset.weights) if blended else []).encode())
    for corpus in dataset.datasets if blended else [dataset]:
        for index in (corpus.document_index, corpus.sample_index, corpus.shuffle_index):
            rows = [np.asarray(index[i]) for i in range(min(len(index), _HEAD_ROWS))]
            digest.update(f"{len(index)} ".encode() + np.asarray(rows, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
