"""The random numbers that vLLM's rejection sampler draws: Triton's `tl.rand`, a Philox 4x32 of (seed, position).

They are the interpreter's and a GPU's to the last bit.
"""

from __future__ import annotations

import numpy as np

_NUM_ROUNDS = 10
_MASK_32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_FACTOR_EVEN, _FACTOR_ODD = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEP_LOW, _KEY_STEP_HIGH = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
# What a 31-bit number is multiplied by, and vLLM's least outcome, which keeps the logarithm finite.
_SCALE = np.float32(4.6566127342e-10)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in (0, 1) for each pair of a seed and a position.

    Args:
        seeds, positions: int64 [num_rows].

    Returns:
        float32 [num_rows].
    """
    # 32-bit words in 64-bit integers, which hold the product of two of them.
    low, high = seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF
    key_low, key_high = low.astype(np.uint64), high.astype(np.uint64)
    c0 = (positions & 0xFFFFFFFF).astype(np.uint64)
    c1 = ((positions >> 32) & 0xFFFFFFFF).astype(np.uint64)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(_NUM_ROUNDS):
        even, odd = c0 * _FACTOR_EVEN, c2 * _FACTOR_ODD
        c0, c1 = (odd >> _HALF) ^ c1 ^ key_low, odd & _MASK_32
        c2, c3 = (even >> _HALF) ^ c3 ^ key_high, even & _MASK_32
        key_low = (key_low + _KEY_STEP_LOW) & _MASK_32
        key_high = (key_high + _KEY_STEP_HIGH) & _MASK_32
    bits = c0.astype(np.uint32).view(np.int32)
    # The sign bit folds the word onto its complement.
    return np.maximum(np.where(bits < 0, ~bits, bits).astype(np.float32) * _SCALE, _SCALE)
