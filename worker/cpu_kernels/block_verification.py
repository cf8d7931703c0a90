"""Native versions of the kernels in `vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils` for block verification,
which accepts a run of drafts by their joint probability. Shapes that are not given here are those in `rejection`.

After Sun et al., "Block verification accelerates speculative decoding", 2024. The joint ratio of a request's first
drafts is p_i = min(p_(i-1) * target / draft, 1), from p_0 = 1. The residual mass behind them is the sum over all tokens
of max(p_i * target - draft, 0).
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.logits_stats import Softmaxes, draft_logits_rows, row_chunks
from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets


def compute_cumulative_log_p(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
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
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    num_warps: int = 1,
) -> None:
    """Write the logarithm of the joint ratio up to and with the draft that each row judges, for random requests.

    Args:
        cumulative_log_p_ptr: float32 [num_logits], written for drafts; one of -1 keeps the ratio before it.
    """
    idx = idx_mapping_ptr.numpy().astype(np.int64)
    bounds = cu_num_logits_ptr.numpy()[: idx.shape[0] + 1].astype(np.int64)
    temperature = temp_ptr.numpy()[idx]
    num_drafts = np.where(temperature == 0.0, 0, np.maximum(np.diff(bounds) - 1, 0))
    reqs, steps = rows_and_offsets(num_drafts)
    rows = bounds[reqs] + steps
    drafts = draft_sampled_ptr.numpy()[rows + 1].astype(np.int64)
    softmaxes = Softmaxes(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    tokens = np.maximum(drafts, 0)
    log_ratio = softmaxes.target_log_probs(rows, tokens)
    log_ratio -= softmaxes.draft_log_probs(rows, idx[reqs], steps, temperature[reqs], tokens)
    log_ratio[drafts < 0] = 0.0

    cumulative = cumulative_log_p_ptr.numpy()
    log_p = np.zeros(idx.shape, dtype=np.float32)
    for step in range(int(num_drafts.max(initial=0))):
        at_step = np.flatnonzero(steps == step)
        log_p[reqs[at_step]] = np.minimum(log_p[reqs[at_step]] + log_ratio[at_step], np.float32(0.0))
        cumulative[rows[at_step]] = log_p[reqs[at_step]]


def compute_local_residual_mass(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    vocab_num_blocks: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
) -> None:
    """Write each block's share of the residual mass before the draft that a row judges, for random requests.

    The first draft of a request needs none, and a draft of -1 ends the run before it.

    Args:
        local_residual_mass_ptr: float32 [num_logits, num_blocks], written where needed.
        cumulative_log_p_ptr: float32 [num_logits].
        draft_logits_ptr: not None; the residual mass behind certain drafts needs no sum.
    """
    idx = expanded_idx_mapping_ptr.numpy().astype(np.int64)
    steps = expanded_local_pos_ptr.numpy().astype(np.int64)
    temperature = temp_ptr.numpy()[idx]
    softmaxes = Softmaxes(
        target_logits_ptr,
        target_local_max_ptr,
        target_local_sumexp_ptr,
        draft_logits_ptr,
        draft_local_max_ptr,
        draft_local_sumexp_ptr,
    )
    needed = (steps > 0) & (steps < num_speculative_steps) & (temperature != 0.0)
    # A request's last row judges no draft: the input token of the row behind it is not its own.
    needed[:-1] &= (draft_sampled_ptr.numpy()[1:] >= 0) & (steps[1:] > 0)
    needed[-1:] = False
    mass = local_residual_mass_ptr.numpy()
    for rows in row_chunks(np.flatnonzero(needed), vocab_size):
        log_p = target_logits_ptr[torch.from_numpy(rows), :vocab_size].float()
        log_p -= torch.from_numpy(softmaxes.target_log_sum_exp(rows)).unsqueeze(1)
        log_q = draft_logits_rows(draft_logits_ptr, idx[rows], steps[rows], temperature[rows], vocab_size)
        log_q -= torch.from_numpy(softmaxes.draft_log_sum_exp(rows)).unsqueeze(1)
        ratio = torch.from_numpy(np.exp(cumulative_log_p_ptr.numpy()[rows - 1])).unsqueeze(1)
        residual = log_p.exp_().mul_(ratio).sub_(log_q.exp_()).clamp_(min=0.0)
        for block, part in enumerate(residual.split(BLOCK_SIZE, dim=1)):
            mass[rows, block] = part.sum(dim=1).numpy()


def acceptance_thresholds(
    softmaxes: Softmaxes,
    cumulative_log_p: torch.Tensor,
    local_residual_mass: torch.Tensor | None,
    rows: np.ndarray,
    following: np.ndarray,
) -> np.ndarray:
    """The probability with which all drafts up to and with the one that each row judges are accepted together.

    Args:
        cumulative_log_p: float32 [num_logits], from `compute_cumulative_log_p`.
        local_residual_mass: float32 [num_logits, num_blocks] from `compute_local_residual_mass`, or None if drafts are
            certain.
        rows: int64 [num_rows].
        following: int64 [num_rows], the request's next draft, or -1 for none.

    Returns:
        float32 [num_rows].
    """
    thresholds = np.exp(cumulative_log_p.numpy()[rows])
    goes_on = np.flatnonzero(following >= 0)
    ratio, next_rows = thresholds[goes_on], rows[goes_on] + 1
    if local_residual_mass is None:
        mass = ratio * (np.float32(1.0) - np.exp(softmaxes.target_log_probs(next_rows, following[goes_on])))
    else:
        mass = local_residual_mass.numpy()[next_rows].sum(axis=1)
    divisor = mass + np.float32(1.0) - ratio
    is_positive = divisor > 0.0
    thresholds[goes_on] = np.where(is_positive, mass / np.where(is_positive, divisor, np.float32(1.0)), 1.0)
    return thresholds
