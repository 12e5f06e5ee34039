"""Philox in torch's signed integers against numpy's, bit for bit, and both against the published generator."""

import numpy as np
import pytest
import torch

from hetero.runtime.philox import blocks_on_device, blocks_on_host, signed_words

KEYS = (0, 1, 1234, 2**63, 2**64 - 1, 2**64, 0x0123456789ABCDEF << 64 | 0xFEDCBA9876543210, 2**128 - 1)
UPPERS = (0, 1, 2**63, 2**64 + 5, 2**128 - 1, 0xDEADBEEF << 90 | 12345)
FIRSTS = (0, 1, 2**31 - 2, 2**32 - 3, 2**40 + 7)


def by_torch(key: int, upper: int, first: int, count: int) -> np.ndarray:
    third, fourth = (torch.full((count,), word) for word in signed_words(upper))
    words = blocks_on_device(key, (third, fourth), torch.arange(first, first + count))
    return torch.stack(words, dim=1).numpy().view(np.uint64)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("upper", UPPERS)
def test_torch_computes_the_blocks_of_numpy(key: int, upper: int) -> None:
    for first in FIRSTS:
        np.testing.assert_array_equal(by_torch(key, upper, first, 33), blocks_on_host(key, upper, first, 33))


def test_a_block_depends_on_its_number_alone() -> None:
    whole = blocks_on_host(5, 6, 0, 40)
    np.testing.assert_array_equal(whole[11:29], blocks_on_host(5, 6, 11, 18))


def test_the_authors_known_answer() -> None:
    """Random123's table has this for a key and a counter of zeros; the functions add one to the number of a block."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = blocks_on_device(0, (zero, zero), zero - 1)
    assert [f"{int(word) % 2**64:016x}" for word in words] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]
