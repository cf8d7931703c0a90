"""Native versions of the kernels in `vllm.v1.worker.gpu.input_batch`.

Shapes: num_reqs rows in the batch; max_num_reqs request states, which `idx_mapping` [num_reqs] points into. A request
has one row in a batch at most. `query_start_loc` and `cu_num_logits` are int32 prefix sums with num_reqs + 1 entries
at least. All are in place on the tensors given. Names follow the kernels' own, which vLLM's launchers rely on.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets


def _lengths(prefix_sums: torch.Tensor, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of each row, from a prefix sum."""
    bounds = prefix_sums.numpy()[: num_rows + 1]
    return bounds[:-1], bounds[1:] - bounds[:-1]


def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled prompt tokens of prefilling rows into `input_ids`, and note the prompt tokens that come next.

    Args:
        input_ids_ptr: int32 [max_num_tokens], written.
        next_prefill_tokens_ptr: int32 [num_lookahead, max_num_reqs], written; 0 where the prompt ends.
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        prefill_lens_ptr, num_computed_tokens_ptr: int32 [max_num_reqs].
    """
    idx = idx_mapping_ptr.numpy()
    prefill_lens = prefill_lens_ptr.numpy()[idx]
    num_computed = num_computed_tokens_ptr.numpy()[idx]
    prefilling = np.flatnonzero(num_computed < prefill_lens)
    if prefilling.size == 0:
        return
    starts, query_lens = _lengths(query_start_loc_ptr, idx.shape[0])
    input_ids = input_ids_ptr.numpy()
    all_token_ids = all_token_ids_ptr.numpy()
    next_tokens = next_prefill_tokens_ptr.numpy()
    for row in prefilling.tolist():
        req, start, length = int(idx[row]), int(starts[row]), int(query_lens[row])
        first = int(num_computed[row])
        end = first + length
        input_ids[start : start + length] = all_token_ids[req, first:end]
        num_known = min(max(int(prefill_lens[row]) - end, 0), num_lookahead)
        next_tokens[:num_known, req] = all_token_ids[req, end : end + num_known]
        next_tokens[num_known:num_lookahead, req] = 0


def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write each token's position and each row's sequence length.

    Args:
        pos_ptr: int64 [max_num_tokens], written.
        seq_lens_ptr: int32 [max_num_reqs], written; 0 after the batch's rows.
        num_computed_tokens_ptr: int32 [max_num_reqs].
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    num_computed = num_computed_tokens_ptr.numpy()[idx]
    starts, query_lens = _lengths(query_start_loc_ptr, num_reqs)
    seq_lens = seq_lens_ptr.numpy()
    np.add(num_computed, query_lens, out=seq_lens[:num_reqs])
    seq_lens[num_reqs:max_num_reqs] = 0
    if num_reqs == 0:
        return
    pos = pos_ptr.numpy()
    first = int(starts[0])
    if query_lens.min() == 1 == query_lens.max():
        pos[first : first + num_reqs] = num_computed
        return
    rows, offsets = rows_and_offsets(query_lens)
    np.add(num_computed[rows], offsets, out=pos[first : first + rows.shape[0]])


def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put the last sampled token, and drafts if any, of decoding rows into `input_ids`; say which tokens need logits.

    Args:
        input_ids_ptr: int32 [max_num_tokens], written.
        last_sampled_tokens_ptr: int64 [max_num_reqs, 1].
        seq_lens_ptr: int32 [num_reqs or more].
        prefill_len_ptr: int32 [max_num_reqs].
        draft_tokens_ptr: int64 [max_num_reqs, num_speculative_steps].
        logits_indices_ptr: int64 [num_logits], written.
        NUM_NEW_SAMPLED_TOKENS: 1, or 0 for a model whose every logit belongs to a draft.
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    if num_reqs == 0:
        return
    query_ends = query_start_loc_ptr.numpy()[1 : num_reqs + 1]
    first_logits, num_logits = _lengths(cu_num_logits_ptr, num_reqs)
    seq_lens = seq_lens_ptr.numpy()[:num_reqs]
    prefill_lens = prefill_len_ptr.numpy()[idx]
    input_ids = input_ids_ptr.numpy()
    logits_indices = logits_indices_ptr.numpy()
    last_sampled = last_sampled_tokens_ptr.numpy().reshape(-1)

    logits_starts = query_ends - num_logits
    total_logits = int(first_logits[-1] + num_logits[-1])
    if NUM_NEW_SAMPLED_TOKENS == 1 and num_logits.max() == 1:
        logits_indices[:num_reqs] = logits_starts
        decoding = np.flatnonzero(seq_lens > prefill_lens)
        input_ids[logits_starts[decoding]] = last_sampled[idx[decoding]]
        return

    rows, offsets = rows_and_offsets(num_logits)
    logits_indices[:total_logits] = logits_starts[rows] + offsets
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A row whose first logit still stands on a prompt token keeps that token: only generated ones are rewritten.
        writes_last = np.flatnonzero((seq_lens > prefill_lens) & (seq_lens - num_logits >= prefill_lens))
        input_ids[logits_starts[writes_last]] = last_sampled[idx[writes_last]]
    draft_tokens = draft_tokens_ptr.numpy()
    num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
    for row in np.flatnonzero((seq_lens > prefill_lens) & (num_drafts > 0)).tolist():
        end, count = int(query_ends[row]), int(num_drafts[row])
        input_ids[end - count : end] = draft_tokens[idx[row], :count]


def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Set both counts to 0 for rows that are still prefilling, and derive the number of rejected tokens for the others.

    Args:
        num_sampled_ptr: int32 [num_reqs], read and written.
        num_rejected_ptr: int32 [num_reqs], written.
        seq_lens_ptr: int32 [num_reqs or more].
        prefill_len_ptr: int32 [max_num_reqs].
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    finished_prefill = seq_lens_ptr.numpy()[:num_reqs] >= prefill_len_ptr.numpy()[idx]
    _, num_logits = _lengths(cu_num_logits_ptr, num_reqs)
    num_sampled = num_sampled_ptr.numpy()[:num_reqs]
    num_sampled *= finished_prefill
    num_rejected = num_rejected_ptr.numpy()[:num_reqs]
    np.subtract(num_logits, num_sampled, out=num_rejected)
    num_rejected *= finished_prefill


def post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Append the sampled tokens to their requests and advance the counters.

    Rows whose `idx_mapping` is negative are skipped.

    Args:
        num_computed_tokens_ptr, total_len_ptr: int32 [max_num_reqs], updated.
        last_sampled_tokens_ptr: int64 [max_num_reqs, 1], written.
        output_bin_counts_ptr: int32 [max_num_reqs, vocab_size], updated, or None.
        sampled_tokens_ptr: int64 [num_reqs, num_speculative_steps + 1].
        num_sampled_ptr, num_rejected_ptr: int32 [num_reqs].
        query_start_loc_ptr: None stands for no tokens computed.
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len], written.

    Raises:
        IndexError: a token would land after the last column of `all_token_ids`.
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    num_sampled = num_sampled_ptr.numpy()[:num_reqs]
    num_rejected = num_rejected_ptr.numpy()[:num_reqs]
    sampled = sampled_tokens_ptr.numpy()
    total_len = total_len_ptr.numpy()
    all_token_ids = all_token_ids_ptr.numpy()
    last_sampled = last_sampled_tokens_ptr.numpy().reshape(-1)
    bin_counts = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()

    rows = np.flatnonzero((idx >= 0) & (num_sampled > 0))
    if rows.size:
        reqs, counts = idx[rows], num_sampled[rows]
        old_len = total_len[reqs]
        last_sampled[reqs] = sampled[rows, counts - 1]
        for i in range(int(counts.max())):
            if i > 0:
                more = np.flatnonzero(counts > i)
                rows, reqs, counts, old_len = rows[more], reqs[more], counts[more], old_len[more]
            tokens = sampled[rows, i]
            all_token_ids[reqs, old_len + i] = tokens
            if bin_counts is not None:
                bin_counts[reqs, tokens] += 1
            total_len[reqs] += 1

    if query_start_loc_ptr is None:
        computed = -num_rejected
    else:
        computed = _lengths(query_start_loc_ptr, num_reqs)[1] - num_rejected
    valid = idx >= 0
    num_computed = num_computed_tokens_ptr.numpy()
    if valid.all():
        num_computed[idx] += computed
    else:
        num_computed[idx[valid]] += computed[valid]


def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
) -> None:
    """Add each row's scheduled tokens to its request's int32 [max_num_reqs] count of computed tokens."""
    idx = idx_mapping_ptr.numpy()
    num_computed_tokens_ptr.numpy()[idx] += _lengths(query_start_loc_ptr, idx.shape[0])[1]


def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Repeat each row's request index for each of its logits, and number the logits within the row.

    Args:
        expanded_idx_mapping_ptr: the dtype of `idx_mapping`, [num_logits], written.
        expanded_local_pos_ptr: int32 [num_logits], written.
    """
    idx = idx_mapping_ptr.numpy()
    _, num_logits = _lengths(cu_num_logits_ptr, idx.shape[0])
    rows, offsets = rows_and_offsets(num_logits)
    expanded_idx_mapping_ptr.numpy()[: rows.shape[0]] = idx[rows]
    expanded_local_pos_ptr.numpy()[: rows.shape[0]] = offsets
