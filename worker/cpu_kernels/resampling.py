"""Native versions of the kernels in `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils` that draw the token after
the last accepted draft. Shapes that are not given here are those in `rejection`.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.gumbel import block_argmax, float32_array
from vllm_handoff.worker.cpu_kernels.gumbel_noise import gumbel_noise
from vllm_handoff.worker.cpu_kernels.logits_stats import best_token, draft_logits_rows, row_chunks


def _log_difference(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log(max(exp(log_p) - exp(log_q), 0)), without the loss of digits of the plain formula. Overwrites log_q."""
    ratio = log_q.sub_(log_p).exp_()
    # A ratio of 1 or more is log(0), and so is that of two tokens of probability 0, which is NaN.
    nothing_left = ~(ratio < 1.0)
    return ratio.neg_().log1p_().add_(log_p).masked_fill_(nothing_left, float("-inf"))


def resample(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Write the best token of each block of the vocabulary, with its noised logit, for the token to be drawn next.

    A bonus token is drawn from the target's distribution. In place of a rejected draft a token is drawn from what the
    target's distribution has above the draft's, which is zero for the draft itself if it was certain. Greedy requests
    that rejected a draft have their token already.

    Args:
        resampled_local_argmax_ptr: int64 [num_reqs, num_blocks], written.
        resampled_local_max_ptr: float32, or with USE_FP64 float64, [num_reqs, num_blocks], written.
        target_rejected_logsumexp_ptr, draft_rejected_logsumexp_ptr: float32 [num_reqs].
        rejected_step_ptr: int32 [num_reqs], the number of accepted drafts.
        cumulative_log_p_ptr: float32 [num_logits], with USE_BLOCK_VERIFICATION: see `block_verification`.

    Raises:
        NotImplementedError: a watermark is asked for.
    """
    if WATERMARK:
        raise NotImplementedError("Watermarking has no native CPU version")
    num_accepted = rejected_step_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: num_accepted.shape[0] + 1].astype(np.int64)
    rows = bounds[:-1] + num_accepted
    reqs = expanded_idx_mapping_ptr.numpy()[rows].astype(np.int64)
    temperature = temp_ptr.numpy()[reqs]
    is_bonus = rows == bounds[1:] - 1
    input_tokens = draft_sampled_ptr.numpy()
    rejected_drafts = np.where(is_bonus, -1, input_tokens[np.minimum(rows + 1, input_tokens.shape[0] - 1)])
    target_lse, draft_lse = target_rejected_logsumexp_ptr.numpy(), draft_rejected_logsumexp_ptr.numpy()
    local_argmax, local_max = resampled_local_argmax_ptr.numpy(), resampled_local_max_ptr.numpy()
    seeds, positions = seed_ptr.numpy(), pos_ptr.numpy()

    # Indices into the batch from here on, as for `local_argmax`.
    for chosen in row_chunks(np.flatnonzero((temperature == 0.0) & is_bonus), vocab_size):
        logits = target_logits_ptr[torch.from_numpy(rows[chosen]), :vocab_size]
        block_argmax(float32_array(logits), BLOCK_SIZE, chosen, local_argmax, local_max)
    for chosen in row_chunks(np.flatnonzero(temperature != 0.0), vocab_size):
        logits = target_logits_ptr[torch.from_numpy(rows[chosen]), :vocab_size].float()
        minus_draft = np.flatnonzero(rejected_drafts[chosen] >= 0)
        places, minus = torch.from_numpy(minus_draft), chosen[minus_draft]
        if draft_logits_ptr is None:
            logits[places, torch.from_numpy(rejected_drafts[minus].astype(np.int64))] = float("-inf")
        elif minus.size:
            log_p = logits[places] - torch.from_numpy(target_lse[minus]).unsqueeze(1)
            if USE_BLOCK_VERIFICATION:
                assert cumulative_log_p_ptr is not None
                # The joint ratio of the accepted drafts weighs the target; that of none is 1.
                before = cumulative_log_p_ptr.numpy()[np.maximum(rows[minus] - 1, 0)]
                weight = np.where(num_accepted[minus] > 0, before, np.float32(0.0))
                log_p += torch.from_numpy(weight).unsqueeze(1)
            log_q = draft_logits_rows(
                draft_logits_ptr, reqs[minus], num_accepted[minus], temperature[minus], vocab_size
            )
            log_q -= torch.from_numpy(draft_lse[minus]).unsqueeze(1)
            logits[places] = _log_difference(log_p, log_q)
        noised = gumbel_noise(seeds[reqs[chosen]], positions[rows[chosen]], vocab_size, use_fp64=USE_FP64)
        noised += logits.numpy()
        block_argmax(noised, BLOCK_SIZE, chosen, local_argmax, local_max)


def insert_resampled(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Put the token that `resample` drew behind the accepted drafts, and count it, or the one that is there already.

    Args:
        sampled_ptr: int64 [num_reqs, num_speculative_steps + 1], updated.
        num_sampled_ptr: int32 [num_reqs], the number of accepted drafts; increased by one.
        resampled_local_argmax_ptr, resampled_local_max_ptr: as in `resample`.
    """
    num_sampled = num_sampled_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: num_sampled.shape[0] + 1]
    rows = bounds[:-1] + num_sampled
    temperature = temp_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[rows]]
    drawn = np.flatnonzero((temperature != 0.0) | (rows == bounds[1:] - 1))
    tokens = best_token(resampled_local_max_ptr.numpy()[drawn], resampled_local_argmax_ptr.numpy()[drawn])
    sampled_ptr.numpy()[drawn, num_sampled[drawn]] = tokens
    num_sampled += 1
