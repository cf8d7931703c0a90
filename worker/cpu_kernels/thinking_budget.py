"""Native versions of the kernels in `vllm.v1.worker.gpu.sample.thinking_budget`."""

from __future__ import annotations

import numpy as np
import torch

_FORCED_LOGIT = 1.0e9


def _last_match(tokens: np.ndarray, marker: np.ndarray, num_starts: int) -> int:
    """The greatest of the first `num_starts` places at which the whole marker stands in `tokens`, or -1."""
    num_starts = min(num_starts, tokens.shape[0] - marker.shape[0] + 1)
    if num_starts <= 0:
        return -1
    matches = np.ones(num_starts, dtype=bool)
    for j, token in enumerate(marker.tolist()):
        matches &= tokens[j : j + num_starts] == token
    places = np.flatnonzero(matches)
    return int(places[-1]) if places.size else -1


def update_committed_marker_cache(
    req_ids_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    cached_scan_pos_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    MAX_LEN: int,
    BLOCK: int,
) -> None:
    """Find where each request's committed tokens last hold the marker that starts reasoning and the one that ends it.

    Args:
        req_ids_ptr: int [num_reqs], request state indices.
        thinking_token_budget_ptr: int32 [max_num_reqs]; requests with a negative one are skipped.
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        total_len_ptr: int32 [max_num_reqs].
        cached_last_start_ptr, cached_last_end_ptr: int32 [max_num_reqs], updated; -1 is none found.
        cached_scan_pos_ptr: int32 [max_num_reqs], updated: where the next scan begins.
        reasoning_start_token_ids_ptr: int32 [START_LEN].
        natural_reasoning_end_token_ids_ptr: int32 [NATURAL_END_LEN].
        BLOCK: tokens per step of the first scan, which walks backward and stops at the first step with a marker.
    """
    start_marker, end_marker = reasoning_start_token_ids_ptr.numpy(), natural_reasoning_end_token_ids_ptr.numpy()
    all_token_ids, total_lens = all_token_ids_ptr.numpy(), total_len_ptr.numpy()
    last_starts, last_ends = cached_last_start_ptr.numpy(), cached_last_end_ptr.numpy()
    scan_positions, budgets = cached_scan_pos_ptr.numpy(), thinking_token_budget_ptr.numpy()
    for req in req_ids_ptr.tolist():
        if budgets[req] < 0:
            continue
        total_len, scan_pos = int(total_lens[req]), int(scan_positions[req])
        last_start, last_end = int(last_starts[req]), int(last_ends[req])
        if scan_pos > total_len:
            scan_pos, last_start, last_end = 0, -1, -1
        tokens = all_token_ids[req, :total_len]
        if scan_pos == 0 and last_start < 0 and last_end < 0:
            high = total_len
            while high > 0 and last_start < 0 and last_end < 0:
                low = max(high - BLOCK, 0)
                window = tokens[low : high + MAX_LEN - 1]
                start, end = (_last_match(window, marker, high - low) for marker in (start_marker, end_marker))
                last_start = low + start if start >= 0 else -1
                last_end = low + end if end >= 0 else -1
                high = low
        else:
            start, end = (_last_match(tokens[scan_pos:], marker, total_len) for marker in (start_marker, end_marker))
            last_start = scan_pos + start if start >= 0 else last_start
            last_end = scan_pos + end if end >= 0 else last_end
        last_starts[req], last_ends[req] = last_start, last_end
        scan_positions[req] = max(total_len - (MAX_LEN - 1), 0)


def force_reasoning_end(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    thinking_token_budget_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cached_last_start_ptr: torch.Tensor,
    cached_last_end_ptr: torch.Tensor,
    reasoning_start_token_ids_ptr: torch.Tensor,
    natural_reasoning_end_token_ids_ptr: torch.Tensor,
    reasoning_end_token_ids_ptr: torch.Tensor,
    START_LEN: int,
    NATURAL_END_LEN: int,
    END_LEN: int,
) -> None:
    """Give the next token of the end marker a winning logit in rows whose reasoning has used up its budget.

    Args:
        logits_ptr: float32 [num_tokens, vocab_size], updated.
        expanded_idx_mapping_ptr: int [num_tokens].
        thinking_token_budget_ptr: int32 [max_num_reqs], tokens; negative is none.
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        total_len_ptr, cached_last_start_ptr, cached_last_end_ptr: int32 [max_num_reqs].
        input_ids_ptr: int32 [num_tokens], each row's input token: drafts from a request's second row on.
        expanded_local_pos_ptr: int32 [num_tokens].
        reasoning_start_token_ids_ptr, natural_reasoning_end_token_ids_ptr, reasoning_end_token_ids_ptr: int32, of the
            lengths START_LEN, NATURAL_END_LEN and END_LEN.
    """
    idx = expanded_idx_mapping_ptr.numpy()
    budgets = thinking_token_budget_ptr.numpy()[idx]
    logits, input_ids, local_pos = logits_ptr.numpy(), input_ids_ptr.numpy(), expanded_local_pos_ptr.numpy()
    all_token_ids, total_lens = all_token_ids_ptr.numpy(), total_len_ptr.numpy()
    last_starts, last_ends = cached_last_start_ptr.numpy(), cached_last_end_ptr.numpy()
    start_marker, natural_end_marker = (
        reasoning_start_token_ids_ptr.numpy(),
        natural_reasoning_end_token_ids_ptr.numpy(),
    )
    end_marker = reasoning_end_token_ids_ptr.tolist()
    longest = max(START_LEN, NATURAL_END_LEN, END_LEN)
    for row in np.flatnonzero(budgets >= 0).tolist():
        req, pos = idx[row], int(local_pos[row])
        total_len = int(total_lens[req])
        last_start, last_end = int(last_starts[req]), int(last_ends[req])
        # Enough committed tokens to see a marker that the drafts complete, then the drafts.
        low = max(total_len - longest, 0)
        tail = np.concatenate((all_token_ids[req, low:total_len], input_ids[row - pos + 1 : row + 1]))
        effective_len = total_len + pos
        if pos > 0:
            last_start = _match_from(tail, low, total_len - START_LEN + 1, start_marker, last_start)
            last_end = _match_from(tail, low, total_len - NATURAL_END_LEN + 1, natural_end_marker, last_end)
        if last_start < 0 or last_start <= last_end:
            continue
        if effective_len - (last_start + START_LEN) < budgets[row]:
            continue
        # A request may have begun the end marker already: go on from there.
        begun = 0
        tail_tokens = tail.tolist()
        for length in range(1, min(END_LEN - 1, effective_len) + 1):
            if tail_tokens[-length:] == end_marker[:length]:
                begun = length
        logits[row, end_marker[begun]] = _FORCED_LOGIT


def _match_from(tail: np.ndarray, low: int, first: int, marker: np.ndarray, found: int) -> int:
    """The last place of the marker at `first` or later, given the tokens from place `low` on; else `found`."""
    first = max(first, 0)
    place = _last_match(tail[first - low :], marker, tail.shape[0])
    return first + place if place >= 0 else found
