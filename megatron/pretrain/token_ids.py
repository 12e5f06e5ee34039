"""Checks that token files hold only ids of the tokenizer, whenever a part of them is read.

An embedding that is split over tensor-parallel ranks gives zeros for an id that no rank has, a row of the padding
trains as if it were a token, and megatron-core's GPTDataset takes -1 for padding. None of them is an error by itself.
"""

from itertools import islice
from typing import Any

import numpy as np

from hetero.errors import ConfigError
from megatron.pretrain.core_datasets import GPTDataset, GPTDatasetConfig, IndexedDataset
from megatron.pretrain.tokenizer import NullTokenizer, Tokenizer

_PROBE_TOKENS = 2**16


class CheckedTokens(IndexedDataset):  # type: ignore[misc]  # megatron-core has no types
    """Token files that refuse to return an id that the tokenizer does not have."""

    def __init__(self, prefix: str, tokenizer: Tokenizer, *, mmap: bool = True) -> None:
        super().__init__(prefix, mmap=mmap)
        self._tokenizer = tokenizer
        dtype = np.dtype(self.index.dtype)
        self._unsigned = np.dtype(f"u{dtype.itemsize}")
        # As an unsigned number an id below zero is above all others of its type: one pass finds both.
        self._limit = min(tokenizer.vocab_size, int(np.iinfo(dtype).max) + 1)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return the ids of a sequence from ``offset`` on, ``length`` of them or all.

        Raises:
            ConfigError: one of them is not an id of the tokenizer.
        """
        ids: np.ndarray = super().get(idx, offset, length)
        if ids.size and ids.view(self._unsigned).max() >= self._limit:
            position = int(np.argmax(ids.view(self._unsigned) >= self._limit))
            raise ConfigError(
                f"{self.path_prefix}: token id {ids[position]} in sequence {idx} at position {offset + position}, "
                f"{_known_ids(self._tokenizer)}"
            )
        return ids


class CheckedGPTDataset(GPTDataset):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's dataset over :class:`CheckedTokens`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the token files of ``dataset_path``, as the dataset's builder asks for them."""
        return CheckedTokens(dataset_path, config.tokenizer, mmap=config.mmap_bin_files)


def check_first_tokens(prefix: str, tokenizer: Tokenizer) -> None:
    """Check the first 65,536 tokens: most data of another tokenizer is refused before a model is built.

    Raises:
        ConfigError: one of them is not an id of the tokenizer.
    """
    tokens, left = CheckedTokens(prefix, tokenizer), _PROBE_TOKENS
    # Sequences may be empty, so their number has a limit too.
    for idx, length in enumerate(islice(tokens.sequence_lengths, _PROBE_TOKENS)):
        left -= len(tokens.get(idx, 0, min(int(length), left)))
        if not left:
            return


def _known_ids(tokenizer: Any) -> str:
    """Say which ids there are, and how to get data and tokenizer together."""
    fix = "raise --vocab-size" if isinstance(tokenizer, NullTokenizer) else "give the tokenizer that made the data"
    return (
        f"{type(tokenizer).__name__} has ids from 0 to {tokenizer.vocab_size - 1}: {fix}, or preprocess the text again"
    )
