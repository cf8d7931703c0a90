"""Native versions of the kernels in `vllm.v1.worker.gpu.spec_decode.rejection_sampler`, and of those in
`rejection_sampler_utils` that every verification launches.

A request with n draft tokens has n + 1 rows of logits: one from which each draft is judged, and one for the bonus token
that follows if all are accepted. A row's input token is the draft that the row before it judges. `cu_num_logits`
int32 [num_reqs + 1] are the prefix sums of the rows. Drafts of -1 are never accepted.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.block_verification import acceptance_thresholds
from vllm_handoff.worker.cpu_kernels.logits_stats import Softmaxes, best_token
from vllm_handoff.worker.cpu_kernels.philox import uniform
from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets


def flatten_sampled(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    num_warps: int = 1,
) -> None:
    """Write each sampled token into the row of logits that it was sampled from.

    Args:
        flat_sampled_ptr: int64 [num_logits], written; unchanged for rows behind a request's last sampled token.
        sampled_ptr: int64 [num_reqs, num_speculative_steps + 1].
        num_sampled_ptr: int32 [num_reqs].
    """
    reqs, offsets = rows_and_offsets(num_sampled_ptr.numpy())
    starts = cu_num_logits_ptr.numpy()[reqs]
    flat_sampled_ptr.numpy()[starts + offsets] = sampled_ptr.numpy()[reqs, offsets]


def gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the input token and the position of each row of logits, and -1 for drafts that nobody proposed.

    A step that begins within the request's prompt can have no drafts: what stands there fills the row up.

    Args:
        draft_sampled_ptr: the dtype of `input_ids`, [num_logits], written.
        pos_ptr: the dtype of `positions`, [num_logits], written.
        input_ids_ptr: int32 [num_tokens].
        positions_ptr: int64 [num_tokens].
        logits_indices_ptr: int64 [num_logits], indexes `input_ids`.
        expanded_idx_mapping_ptr, expanded_local_pos_ptr: int [num_logits].
        prefill_len_ptr: int32 [max_num_reqs].
    """
    tokens = logits_indices_ptr.numpy()
    pos = positions_ptr.numpy()[tokens]
    local_pos = expanded_local_pos_ptr.numpy()[:num_logits]
    prefill_len = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    is_placeholder = (local_pos > 0) & (pos - local_pos < prefill_len)
    draft_sampled_ptr.numpy()[:] = np.where(is_placeholder, -1, input_ids_ptr.numpy()[tokens])
    pos_ptr.numpy()[:] = pos


def _num_leading(flags: np.ndarray, rows: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """How many flags are set in each row before the first that is not: int64 [num_rows].

    Args:
        flags: bool [sum(lengths)].
        rows, offsets: from `rows_and_offsets(lengths)`.
        lengths: int [num_rows].
    """
    leading = lengths.astype(np.int64)
    unset = np.flatnonzero(~flags)
    np.minimum.at(leading, rows[unset], offsets[unset])
    return leading


def verify_drafts(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    num_warps: int = 1,
) -> None:
    """Judge the drafts, and write those that are accepted and their number.

    A greedy request accepts drafts while they are the target's best token, and gets that token instead of the first
    that is not. Another request accepts a draft with probability p / q, target's over draft's, or, with
    USE_BLOCK_VERIFICATION, a run of drafts by their joint probability. The token after the last accepted one is left
    to `resample`. SYNTHETIC_MODE accepts by given rates instead, whatever the draft.

    Args:
        sampled_ptr: int64 [num_reqs, num_speculative_steps + 1], written up to the number of accepted drafts, for
            greedy requests one further; what is behind means nothing.
        rejected_steps_ptr: int32 [num_reqs], written: the number of accepted drafts.
        target_rejected_logsumexp_ptr, draft_rejected_logsumexp_ptr: float32 [num_reqs], written: the normaliser of the
            first rejected row's logits, and 0 where `resample` needs none.
        target_logits_ptr, draft_logits_ptr, temp_ptr, and all that is named `local_max`, `local_sumexp` or
            `local_argmax`: as in `logits_stats.compute_local_logits_stats`.
        draft_sampled_ptr: int [num_logits], each row's input token.
        idx_mapping_ptr: int [num_reqs].
        seed_ptr: int64 [max_num_reqs].
        pos_ptr: int64 [num_logits].
        synthetic_conditional_rates_ptr: float32 [num_speculative_steps] or None.
        cumulative_log_p_ptr, local_residual_mass_ptr: as in `block_verification`, or None.
    """
    idx = idx_mapping_ptr.numpy().astype(np.int64)
    bounds = cu_num_logits_ptr.numpy()[: idx.shape[0] + 1].astype(np.int64)
    starts, num_drafts = bounds[:-1], np.maximum(np.diff(bounds) - 1, 0)
    reqs, steps = rows_and_offsets(num_drafts)
    rows = starts[reqs] + steps
    input_tokens = draft_sampled_ptr.numpy()
    drafts = input_tokens[rows + 1].astype(np.int64)
    is_valid = drafts >= 0
    drafts = np.maximum(drafts, 0)
    temperature = temp_ptr.numpy()[idx]
    is_greedy = temperature[reqs] == 0.0
    greedy, random = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
    softmaxes = Softmaxes(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )

    # Where the kernel stops at a request's first rejected draft, each one is judged here, by itself.
    accepted = np.zeros(drafts.shape, dtype=bool)
    draws = uniform(seed_ptr.numpy()[idx[reqs]], pos_ptr.numpy()[rows])
    target_best = best_token(target_local_max_ptr.numpy()[rows[greedy]], target_local_argmax_ptr.numpy()[rows[greedy]])
    if SYNTHETIC_MODE:
        assert synthetic_conditional_rates_ptr is not None
        accepted = draws < synthetic_conditional_rates_ptr.numpy()[steps]
    else:
        accepted[greedy] = target_best == drafts[greedy]
        if not USE_BLOCK_VERIFICATION:
            judged = rows[random], idx[reqs[random]], steps[random], temperature[reqs[random]], drafts[random]
            log_p = softmaxes.target_log_probs(rows[random], drafts[random])
            accepted[random] = log_p > np.log(draws[random]) + softmaxes.draft_log_probs(*judged)
    accepted &= is_valid
    num_accepted = _num_leading(accepted, reqs, steps, num_drafts)

    if USE_BLOCK_VERIFICATION and random.size:
        assert cumulative_log_p_ptr is not None
        tried = random[steps[random] < _num_leading(is_valid, reqs, steps, num_drafts)[reqs[random]]]
        # What stands behind a request's last draft belongs to the next request.
        is_last = steps[tried] + 1 == num_drafts[reqs[tried]]
        following = np.where(is_last, -1, input_tokens[np.minimum(rows[tried] + 2, input_tokens.shape[0] - 1)])
        thresholds = acceptance_thresholds(
            softmaxes, cumulative_log_p_ptr, local_residual_mass_ptr, rows[tried], following.astype(np.int64)
        )
        passed = tried[draws[tried] <= thresholds]
        np.maximum.at(num_accepted, reqs[passed], steps[passed] + 1)

    sampled = sampled_ptr.numpy()
    sampled[reqs, steps] = drafts
    wrong = ~accepted[greedy]
    sampled[reqs[greedy[wrong]], steps[greedy[wrong]]] = target_best[wrong]
    rejected_steps_ptr.numpy()[:] = num_accepted
    target_lse, draft_lse = target_rejected_logsumexp_ptr.numpy(), draft_rejected_logsumexp_ptr.numpy()
    target_lse[:], draft_lse[:] = 0.0, 0.0
    rejected = np.flatnonzero((temperature != 0.0) & (num_accepted < num_drafts))
    target_lse[rejected] = softmaxes.target_log_sum_exp(starts[rejected] + num_accepted[rejected])
    draft_lse[rejected] = softmaxes.draft_log_sum_exp(starts[rejected] + num_accepted[rejected])
