"""Native versions of the kernels in `vllm.v1.worker.gpu.sample.gumbel`."""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.gumbel_noise import gumbel_noise

# Logits that are worked on at once. 64 Ki of them and their scratch arrays stay in a core's L2 cache.
_CHUNK_ELEMENTS = 1 << 16


def float32_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values as float32: a view if they are that already, else a copy."""
    return tensor.float().numpy()


def apply_temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide each row of logits by its request's temperature, in place.

    Temperatures 0 (greedy) and 1 leave the row alone.

    Args:
        logits_ptr: floating [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens], indexes `temperature`.
        temperature_ptr: float32 [max_num_reqs].
    """
    temperature = temperature_ptr.numpy()[expanded_idx_mapping_ptr.numpy()]
    rows = np.flatnonzero((temperature != 0.0) & (temperature != 1.0))
    if rows.size == 0:
        return
    divisor = torch.from_numpy(temperature[rows]).unsqueeze(1)
    if rows.size == temperature.shape[0] and logits_ptr.dtype == torch.float32:
        logits_ptr.div_(divisor)
        return
    selected = torch.from_numpy(rows)
    logits_ptr[selected] = (logits_ptr[selected].float() / divisor).to(logits_ptr.dtype)


def gumbel_sample(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Add Gumbel noise to the logits and write the best token of each block of the vocabulary, with its noised logit.

    Rows of temperature 0, and rows without a request, get no noise: their best token is the plain argmax.

    Args:
        local_argmax_ptr: int64 [num_tokens, num_blocks], written.
        local_max_ptr: float32, or with USE_FP64 float64, [num_tokens, num_blocks], written.
        logits_cache_ptr: [max_num_reqs, num_cols, >= vocab_size] or None; gets a copy of `logits_cache_source`
            [num_tokens, vocab_size] in column `logits_cache_col` (one for all, or with PER_TOKEN_COL [num_tokens]).
        logits_ptr: floating [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens]; negative means no request.
        seeds_ptr: int64 [max_num_reqs].
        pos_ptr: int64 [num_tokens].
        temp_ptr: float32 [max_num_reqs].
        APPLY_TEMPERATURE: the logits have not been divided by the temperature yet.
    """
    num_tokens = local_argmax_ptr.shape[0]
    if num_tokens == 0:
        return
    idx = expanded_idx_mapping_ptr.numpy()
    has_request = idx >= 0
    temperature = np.where(has_request, temp_ptr.numpy()[idx], np.float32(0.0))
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None and logits_cache_source_ptr is not None
        rows = torch.from_numpy(np.flatnonzero(has_request))
        columns = logits_cache_col_ptr[rows] if PER_TOKEN_COL else logits_cache_col_ptr
        reqs = torch.from_numpy(idx[has_request].astype(np.int64))
        logits_cache_ptr[reqs, columns, :vocab_size] = logits_cache_source_ptr[rows]

    local_argmax, local_max = local_argmax_ptr.numpy(), local_max_ptr.numpy()
    greedy = np.flatnonzero(temperature == 0.0)
    sampled = np.flatnonzero(temperature != 0.0)
    chunk_rows = max(1, _CHUNK_ELEMENTS // vocab_size)
    if sampled.size == 0:
        block_argmax(float32_array(logits_ptr), BLOCK_SIZE, slice(None), local_argmax, local_max)
        return
    for begin in range(0, greedy.size, chunk_rows):
        rows = greedy[begin : begin + chunk_rows]
        block_argmax(float32_array(logits_ptr[torch.from_numpy(rows)]), BLOCK_SIZE, rows, local_argmax, local_max)

    seeds, positions = seeds_ptr.numpy(), pos_ptr.numpy()
    for begin in range(0, sampled.size, chunk_rows):
        rows = sampled[begin : begin + chunk_rows]
        # NumPy reads float32 logits in place, and one row needs no gather.
        logits = float32_array(
            logits_ptr[rows[0]].unsqueeze(0) if rows.size == 1 else logits_ptr[torch.from_numpy(rows)]
        )
        if APPLY_TEMPERATURE:
            logits = logits / temperature[rows, None]
        noised = gumbel_noise(seeds[idx[rows]], positions[rows], vocab_size, is_drafting=IS_DRAFTING, use_fp64=USE_FP64)
        noised += logits
        block_argmax(noised, BLOCK_SIZE, rows, local_argmax, local_max)


def block_argmax(
    values: np.ndarray, block_size: int, rows: np.ndarray | slice, local_argmax: np.ndarray, local_max: np.ndarray
) -> None:
    """Write the greatest value of each block of `values` [num_rows, vocab_size], and its lowest index."""
    num_rows, vocab_size = values.shape
    num_blocks = vocab_size // block_size
    whole = num_blocks * block_size
    if num_blocks:
        blocks = values[:, :whole].reshape(num_rows, num_blocks, block_size)
        best = blocks.argmax(axis=2)
        local_argmax[rows, :num_blocks] = best + np.arange(0, whole, block_size)
        local_max[rows, :num_blocks] = np.take_along_axis(blocks, best[:, :, None], axis=2)[:, :, 0]
    if whole < vocab_size:
        tail = values[:, whole:]
        best = tail.argmax(axis=1)
        local_argmax[rows, num_blocks] = best + whole
        local_max[rows, num_blocks] = tail[np.arange(num_rows), best]
