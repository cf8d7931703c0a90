"""The random numbers of vLLM's Gumbel-max sampler: a MurmurHash3 of (seed, position, token) mapped to Gumbel noise.

Every operation is done in the width and order in which the Triton kernel does it, so that a request's seed gives the
same noise here as in Triton's interpreter, to the last bit. On a GPU only `log` may differ in the last place.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_ROUND_1 = np.uint32(0xCC9E2D51)
_ROUND_2 = np.uint32(0x1B873593)
_ADDEND = np.uint32(0xE6546B64)
_FINAL_1 = np.uint32(0x85EBCA6B)
_FINAL_2 = np.uint32(0xC2B2AE35)
_HASHED_BYTES = np.uint32(16)
# Second hash of an fp64 draw; the first uses domain 0.
_FP64_DOMAIN = 0x9E3779B9
_MASK_32 = 0xFFFFFFFF
# Drafts draw from positions no target ever reaches.
_DRAFT_NOISE_SALT = 1 << 30


def _rotl(value: np.ndarray, shift: int) -> np.ndarray:
    return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))


def _mix_key(key: np.ndarray) -> np.ndarray:
    return _rotl(key * _ROUND_1, 15) * _ROUND_2


def _mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    return _rotl(h ^ _mix_key(key), 13) * np.uint32(5) + _ADDEND


@lru_cache(maxsize=4)
def _mixed_token_ids(vocab_size: int) -> np.ndarray:
    """The token's share of the hash, which is the same for every row: uint32 [vocab_size]."""
    return _mix_key(np.arange(vocab_size, dtype=np.uint32))


def _row_states(seeds: np.ndarray, positions: np.ndarray, domain: int) -> np.ndarray:
    """The hash's state before the token is mixed in: uint32 [num_rows]."""
    state = np.full(seeds.shape, domain, dtype=np.uint32)
    for word in (seeds & _MASK_32, (seeds >> 32) & _MASK_32, positions & _MASK_32):
        state = _mix(state, word.astype(np.uint32))
    return state


def _hash(states: np.ndarray, vocab_size: int) -> np.ndarray:
    """The hash of each row's state with each token: uint32 [num_rows, vocab_size]."""
    h = states[:, None] ^ _mixed_token_ids(vocab_size)
    scratch = h >> np.uint32(19)
    h <<= np.uint32(13)
    h |= scratch
    h *= np.uint32(5)
    h += _ADDEND
    h ^= _HASHED_BYTES
    for shift, factor in ((16, _FINAL_1), (13, _FINAL_2)):
        np.right_shift(h, np.uint32(shift), out=scratch)
        h ^= scratch
        h *= factor
    np.right_shift(h, np.uint32(16), out=scratch)
    h ^= scratch
    return h


def _gumbel32(states: np.ndarray, vocab_size: int) -> np.ndarray:
    """float32 [num_rows, vocab_size]."""
    # (hash + 0.5) / 2**32 is exact in fp64, so this rounds to fp32 once, which is what the kernel's sum of halves
    # amounts to.
    wide = _hash(states, vocab_size).astype(np.float64)
    wide += 0.5
    wide *= 2.0**-32
    u = wide.astype(np.float32)
    # log(1 - u): by its series where u is small, for that tail decides who wins.
    small = np.flatnonzero(u.reshape(-1) < 0.25)
    value = u.reshape(-1)[small]
    np.subtract(np.float32(1.0), u, out=u)
    np.maximum(u, np.float32(2.0**-24), out=u)
    noise = np.log(u, out=u)
    polynomial = np.float32(1.0 / 7.0) + value * np.float32(1.0 / 8.0)
    for order in (6, 5, 4, 3, 2, 1):
        polynomial *= value
        polynomial += np.float32(1.0 / order)
    noise.reshape(-1)[small] = -value * polynomial
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _gumbel64(states: np.ndarray, states_high: np.ndarray, vocab_size: int) -> np.ndarray:
    """float64 [num_rows, vocab_size]."""
    bits = _hash(states_high, vocab_size).astype(np.uint64)
    bits <<= np.uint64(32)
    bits |= _hash(states, vocab_size)
    bits >>= np.uint64(11)
    u = bits.astype(np.float64)
    u += 0.5
    u *= 2.0**-53
    # The largest midpoint rounds to 1, whose noise would be infinite.
    u[u == 1.0] -= 2.0**-53
    return -np.log(-np.log(u))


def gumbel_noise(
    seeds: np.ndarray, positions: np.ndarray, vocab_size: int, *, is_drafting: bool = False, use_fp64: bool = False
) -> np.ndarray:
    """The noise that is added to each row's logits before the argmax.

    Args:
        seeds: int64 [num_rows].
        positions: int64 [num_rows], of the token whose logits these are.
        vocab_size: tokens a row.
        is_drafting: draw from the stream reserved for draft tokens.
        use_fp64: draw 53 random bits instead of 32.

    Returns:
        float32, or with use_fp64 float64, [num_rows, vocab_size].
    """
    if is_drafting:
        positions = positions + _DRAFT_NOISE_SALT
    states = _row_states(seeds, positions, 0)
    if use_fp64:
        return _gumbel64(states, _row_states(seeds, positions, _FP64_DOMAIN), vocab_size)
    return _gumbel32(states, vocab_size)
