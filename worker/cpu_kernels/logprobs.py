"""Native versions of the kernels in `vllm.v1.worker.gpu.sample.logprob` and `prompt_logprob`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets

# Bounds the scratch memory that a prompt's logits, thousands of rows, would need: 16 MiB of float32.
_MAX_CHUNK_ELEMENTS = 1 << 22


def _row_chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, _MAX_CHUNK_ELEMENTS // max(1, vocab_size))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log-probabilities of the given tokens.

    Args:
        output_ptr: float32 [num_rows, topk], written.
        logits_ptr: floating [num_rows, vocab_size].
        topk_ids_ptr: int64 [num_rows, topk].
    """
    for rows in _row_chunks(logits_ptr.shape[0], vocab_size):
        logits = logits_ptr[rows].float()
        greatest = logits.amax(dim=1, keepdim=True)
        log_sum_exp = (logits - greatest).exp_().sum(dim=1, keepdim=True).log_()
        output_ptr[rows] = logits.gather(1, topk_ids_ptr[rows]) - greatest - log_sum_exp


def token_ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write how many tokens of each row have at least the logit of the given one: 1 for the best.

    Args:
        output_ptr: int64 [num_rows], written.
        logits_ptr: floating [num_rows, vocab_size].
        token_ids_ptr: int [num_rows].
    """
    ranks = output_ptr.numpy()
    token_ids = token_ids_ptr.to(torch.int64).unsqueeze(1)
    for rows in _row_chunks(logits_ptr.shape[0], vocab_size):
        logits = logits_ptr[rows]
        at_least = logits >= logits.gather(1, token_ids[rows])
        ranks[rows] = np.count_nonzero(at_least.numpy(), axis=1)


def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """List the tokens whose log-probabilities each row returns: the sampled one, then the request's own or the top
    ones.

    Args:
        out_token_ids_ptr: int64 [num_rows, 1 + num_cols], written where valid.
        out_valid_mask_ptr: bool [num_rows, 1 + num_cols], set where valid.
        sampled_token_ids_ptr: int64 [num_rows].
        topk_indices_ptr: int32 [num_rows, NUM_TOPK]; not read when NUM_TOPK is 0.
        expanded_idx_mapping_ptr: int [num_rows].
        num_per_req_token_ids_ptr: int32 [max_num_reqs]; 0 asks for the top ones.
        per_req_token_ids_ptr: int32 [max_num_reqs, capacity].
    """
    idx = expanded_idx_mapping_ptr.numpy()
    token_ids, valid = out_token_ids_ptr.numpy(), out_valid_mask_ptr.numpy()
    token_ids[:, 0] = sampled_token_ids_ptr.numpy()
    valid[:, 0] = True
    num_own = num_per_req_token_ids_ptr.numpy()[idx]
    if NUM_TOPK:
        rows = np.flatnonzero(num_own <= 0)
        token_ids[rows, 1 : 1 + NUM_TOPK] = topk_indices_ptr.numpy()[rows, :NUM_TOPK]
        valid[rows, 1 : 1 + NUM_TOPK] = True
    own_token_ids = per_req_token_ids_ptr.numpy()
    for row in np.flatnonzero(num_own > 0).tolist():
        count = int(num_own[row])
        token_ids[row, 1 : 1 + count] = own_token_ids[idx[row], :count]
        valid[row, 1 : 1 + count] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Write, for each scheduled token, the token that follows it in its request.

    Args:
        prompt_logprobs_token_ids_ptr: int64 [num_tokens], written; unchanged for a token in the request's last column.
        query_start_loc_ptr: int32 [num_reqs + 1 or more].
        idx_mapping_ptr: int [num_reqs].
        num_computed_tokens_ptr: int32 [max_num_reqs].
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    bounds = query_start_loc_ptr.numpy()[: num_reqs + 1]
    rows, offsets = rows_and_offsets(bounds[1:] - bounds[:-1])
    reqs = idx[rows]
    targets = num_computed_tokens_ptr.numpy()[reqs] + 1 + offsets
    all_token_ids = all_token_ids_ptr.numpy()
    out = prompt_logprobs_token_ids_ptr.numpy()[int(bounds[0]) : int(bounds[num_reqs])]
    # Nothing follows the last column; the kernel reads whatever lies behind it, and the runner drops that row.
    inside = targets < all_token_ids.shape[1]
    out[inside] = all_token_ids[reqs[inside], targets[inside]]
