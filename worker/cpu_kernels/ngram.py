"""Native versions of the kernels in `vllm.v1.worker.gpu.spec_decode.ngram.speculator`.

A request's draft tokens are those that followed the last earlier occurrence of the longest run of tokens that it now
ends with. The two kernels hand the occurrence over as a score, n * (L + 1) + position + 1 for a run of n tokens that
starts at `position`, or 0 for none. The greatest score is the longest run's last occurrence.
"""

from __future__ import annotations

import numpy as np
import torch


def _best_match(tokens: np.ndarray, min_n: int, max_n: int) -> tuple[int, int]:
    """(n, start) of the last earlier occurrence of the longest suffix of min_n to max_n tokens, or (0, 0)."""
    seq_len = tokens.shape[0]
    # Where an occurrence may end: candidates that agree on the last k tokens are looked at for the one before.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = (0, 0)
    for n in range(1, min(max_n, seq_len - 1) + 1):
        if n > 1:
            ends = ends[np.searchsorted(ends, n - 1) :]
            ends = ends[tokens[ends - (n - 1)] == tokens[seq_len - n]]
        if ends.size == 0:
            break
        if n >= min_n:
            best = (n, int(ends[-1]) - n + 1)
    return best


def scan_for_matches(
    token_ids_ptr: torch.Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    scratch_ptr: torch.Tensor,
    scratch_stride: int,
    L: int,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
    num_warps: int = 1,
    num_stages: int = 1,
) -> None:
    """Write the score of each row's best match.

    Rows that sampled nothing, being in their prompt still, have none.

    Args:
        token_ids_ptr: int32 [max_num_reqs, >= L].
        idx_mapping_ptr: int [num_reqs].
        total_len_ptr: int32 [max_num_reqs], tokens of each request.
        num_sampled_ptr: int32 [num_reqs].
        scratch_ptr: int64 [max_num_reqs, num_blocks], written: the score in the block of BLOCK_L positions in which
            the match starts, and 0 in all others. The kernel puts a score in each block that has any match, of which
            only the greatest is looked at later.
    """
    token_ids, total_lens = token_ids_ptr.numpy(), total_len_ptr.numpy()
    idx = idx_mapping_ptr.numpy()
    scores = scratch_ptr.numpy()
    scores[: idx.shape[0]] = 0
    for row in np.flatnonzero(num_sampled_ptr.numpy()[: idx.shape[0]] > 0).tolist():
        req = int(idx[row])
        seq_len = int(total_lens[req])
        if seq_len < max(MIN_N, 1):
            continue
        n, start = _best_match(token_ids[req, :seq_len], MIN_N, MAX_N)
        if n > 0:
            scores[row, start // BLOCK_L] = n * (L + 1) + start + 1


def propose_drafts(
    token_ids_ptr: torch.Tensor,
    token_ids_stride: int,
    idx_mapping_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    scratch_ptr: torch.Tensor,
    scratch_stride: int,
    drafts_ptr: torch.Tensor,
    L: int,
    N_BLOCKS: int,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
    num_warps: int = 1,
    num_stages: int = 1,
) -> None:
    """Write the tokens that followed each row's best match, and the last sampled token where there are none.

    Args:
        token_ids_ptr, idx_mapping_ptr, total_len_ptr, num_sampled_ptr: as in `scan_for_matches`.
        last_sampled_ptr: int64 [max_num_reqs].
        scratch_ptr: int64 [max_num_reqs, N_BLOCKS], scores.
        drafts_ptr: int64 [max_num_reqs, K], written.
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    score = scratch_ptr.numpy()[:num_reqs, :N_BLOCKS].max(axis=1)
    n, start = np.divmod(score - 1, L + 1)
    places = (start + n)[:, None] + np.arange(K)
    has_match = (score > 0) & (num_sampled_ptr.numpy()[:num_reqs] > 0)
    known = has_match[:, None] & (places < total_len_ptr.numpy()[idx][:, None])
    tokens = token_ids_ptr.numpy()[idx[:, None], np.clip(places, 0, L - 1)]
    drafts_ptr.numpy()[:num_reqs] = np.where(known, tokens, last_sampled_ptr.numpy()[idx][:, None])
