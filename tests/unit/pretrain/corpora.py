"""Small corpora of bytes, and the configuration that reads them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.pretrain.cli.training_config import DataConfig
from megatron.pretrain.tokenizer import Tokenizer, build_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

EOD = 256
SEQ = 8


def data_config(**overrides: Any) -> DataConfig:
    values = {
        "data_path": (),
        "train_data_path": (),
        "valid_data_path": (),
        "test_data_path": (),
        "split": "969, 30, 1",
        "data_cache_path": None,
        "mock_data": False,
        "tokenizer_type": "ByteLevelTokenizer",
        "tokenizer_model": None,
        "seq_length": SEQ,
        "eod_mask_loss": False,
        "num_workers": 0,
        "seed": 1234,
    }
    return DataConfig(**{**values, **overrides})


def byte_level() -> Tokenizer:
    return build_tokenizer(tokenizer_type="ByteLevelTokenizer", tokenizer_model=None, vocab_size=None)


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(257))
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def corpus_of_late_tokens(prefix: Path, *, token: int = 61) -> str:
    """More good tokens than are looked at when a run starts, and a tenth of them after that is ``token``."""
    return write_corpus(prefix, [*[[i % 61] * 100 for i in range(660)], *[[token] * 100] * 66])
