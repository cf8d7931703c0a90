"""Native versions of small sampler kernels: NaN counts, trace replay, the sampling mask and the grammar bitmask."""

from __future__ import annotations

import numpy as np
import torch


def num_nans(
    logits_ptr: torch.Tensor, logits_stride: int, num_nans_ptr: torch.Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    """Write the number of NaNs in each row of floating [num_rows, vocab_size] to int32 [num_rows]."""
    num_nans_ptr.copy_(torch.isnan(logits_ptr).sum(dim=1))


def replay_trace(
    sampled_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    trace_token_ids_ptr: torch.Tensor,
    trace_token_ids_stride: int,
    trace_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    prompt_len_ptr: torch.Tensor,
) -> None:
    """Overwrite the sampled tokens of requests that replay a trace.

    Args:
        sampled_ptr: int64 [num_reqs], updated.
        idx_mapping_ptr: int [num_reqs]; negative rows are skipped.
        trace_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        trace_len_ptr, total_len_ptr, prompt_len_ptr: int32 [max_num_reqs]; a trace of length 0 is none.
    """
    idx = idx_mapping_ptr.numpy()
    step = total_len_ptr.numpy()[idx] - prompt_len_ptr.numpy()[idx]
    rows = np.flatnonzero((idx >= 0) & (step >= 0) & (step < trace_len_ptr.numpy()[idx]))
    sampled_ptr.numpy()[rows] = trace_token_ids_ptr.numpy()[idx[rows], step[rows]]


def compact_sampling_mask(
    logits_ptr: torch.Tensor,
    logits_row_stride: int,
    logits_col_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    num_sampled_tokens_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    token_ids_row_stride: int,
    packed_mask_ptr: torch.Tensor,
    packed_mask_row_stride: int,
    counts_ptr: torch.Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
    BLOCK_SIZE: int,
) -> None:
    """Write which tokens each sampled token was drawn from: those with a finite logit.

    Args:
        logits_ptr: floating [num_logits, vocab_size].
        cu_num_logits_ptr: int32 [num_reqs + 1].
        num_sampled_tokens_ptr: int32 [num_reqs]; further output rows of a request get count 0 and nothing else.
        token_ids_ptr: int32 [num_reqs * ROWS_PER_REQUEST, max_num_kept], the first ids, written.
        packed_mask_ptr: uint8 [num_reqs * ROWS_PER_REQUEST, ceil(vocab_size / 8)], a bit per token, written.
        counts_ptr: int32 [num_reqs * ROWS_PER_REQUEST], written.
    """
    counts, token_ids, packed_mask = counts_ptr.numpy(), token_ids_ptr.numpy(), packed_mask_ptr.numpy()
    first_logits, num_sampled = cu_num_logits_ptr.tolist(), num_sampled_tokens_ptr.tolist()
    for row in range(counts.shape[0]):
        req, slot = divmod(row, ROWS_PER_REQUEST)
        if slot >= num_sampled[req]:
            counts[row] = 0
            continue
        kept = torch.isfinite(logits_ptr[first_logits[req] + slot]).numpy()
        kept_ids = np.flatnonzero(kept)
        counts[row] = kept_ids.size
        token_ids[row, : min(kept_ids.size, max_num_kept)] = kept_ids[:max_num_kept]
        packed_mask[row] = np.packbits(kept, bitorder="little")


def apply_grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Forbid, in place, the tokens that a request's grammar does not allow next.

    Args:
        logits_ptr: floating [num_logits, vocab_size].
        logits_indices_ptr: int32 [num_masks], row in the batch times MASK_STRIDE plus the place among the row's logits.
        cu_num_logits_ptr: int32 [num_reqs + 1].
        bitmask_ptr: int32 [num_masks, ceil(vocab_size / 32)]; a set bit allows the token.
    """
    cu_num_logits = cu_num_logits_ptr.tolist()
    bitmask = bitmask_ptr.numpy()
    for mask_idx, mapping in enumerate(logits_indices_ptr.tolist()):
        req, position = divmod(mapping, MASK_STRIDE)
        row = cu_num_logits[req] + position
        if row >= cu_num_logits[req + 1]:
            continue
        words = bitmask[mask_idx]
        if (words == -1).all():
            continue
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
        logits_ptr[row].masked_fill_(torch.from_numpy(allowed == 0), float("-inf"))
