"""Philox4x64-10, a random generator without state: the same bits by numpy on the host and by torch on a device.

It maps a key of 128 bits and a counter of 256 bits to a block of four 64-bit words, so any rank computes any block
alone and in any order. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
numpy guarantees the stream of its bit generators (NEP 19). The first block has the counter that it is given plus one.

A 64-bit word of torch is a signed one here. Sums and products wrap around as those of unsigned words do.
"""

import numpy as np
import numpy.typing as npt
import torch

WORDS = 4
"""64-bit words of a block."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW, _WORD = 2**32 - 1, 2**64 - 1


def blocks_on_host(key: int, upper: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Compute ``count`` consecutive blocks -> [count, 4].

    Args:
        key: 128 bits.
        upper: the upper 128 bits of the counter, the same in all blocks.
        first: number of the first block; it and the count give the lower bits.
    """
    stream = np.random.Philox(key=key, counter=(upper << 128) + first)
    words: npt.NDArray[np.uint64] = stream.random_raw(WORDS * count)
    return words.reshape(count, WORDS)


def blocks_on_device(key: int, upper: tuple[torch.Tensor, torch.Tensor], numbers: torch.Tensor) -> list[torch.Tensor]:
    """Compute the blocks with these ``numbers`` (int64 [n]) on their device -> the words, four int64 [n].

    Args:
        key: 128 bits.
        upper: the third and the fourth word of every counter, each int64 [n].
    """
    keys = [key & _WORD, key >> 64]
    state = [numbers + 1, torch.zeros_like(numbers), *upper]
    for _ in range(_ROUNDS):
        (high_0, low_0), (high_1, low_1) = (_multiply(state[2 * i], _MULTIPLIERS[i]) for i in (0, 1))
        high_1.bitwise_xor_(state[1]).bitwise_xor_(_signed(keys[0]))
        high_0.bitwise_xor_(state[3]).bitwise_xor_(_signed(keys[1]))
        state = [high_1, low_1, high_0, low_0]
        keys = [(word + step) & _WORD for word, step in zip(keys, _KEY_STEPS, strict=True)]
    return state


def signed_words(number: int) -> tuple[int, int]:
    """Split 128 bits into the lower and the upper word, as torch's int64 has them."""
    return _signed(number & _WORD), _signed(number >> 64)


def _multiply(factors: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply unsigned words by a constant -> the upper and the lower words of the products."""
    low, high = factors & _LOW, _upper_half(factors)
    constant_low, constant_high = constant & _LOW, constant >> 32
    # By halves, as on paper: neither sum exceeds 64 bits, as (2^32 - 1)^2 + 2 (2^32 - 1) is 2^64 - 1.
    middle = (high * constant_low).add_(_upper_half(low * constant_low))
    carry = low.mul_(constant_high).add_(middle & _LOW)
    upper = high.mul_(constant_high).add_(_upper_half(middle)).add_(_upper_half(carry))
    return upper, factors * _signed(constant)


def _upper_half(words: torch.Tensor) -> torch.Tensor:
    """Shift by 32 bits without the sign, which torch's shift extends."""
    return (words >> 32).bitwise_and_(_LOW)


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word
