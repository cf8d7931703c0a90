"""What the verification of draft tokens knows about each row of logits, block of the vocabulary by block.

Holds the native version of `_compute_local_logits_stats_kernel` in
`vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils`, and what the module's other kernels read out of its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.gumbel import block_argmax, float32_array

# Bounds the scratch memory: 4 MiB of float32.
_CHUNK_ELEMENTS = 1 << 20


def row_chunks(rows: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """Runs of `rows` whose logits are worked on at once."""
    step = max(1, _CHUNK_ELEMENTS // max(1, vocab_size))
    for begin in range(0, rows.size, step):
        yield rows[begin : begin + step]


def draft_logits_rows(
    draft_logits: torch.Tensor, reqs: np.ndarray, steps: np.ndarray, temperature: np.ndarray, vocab_size: int
) -> torch.Tensor:
    """The draft's logits over the temperature: float32 [num_rows, vocab_size].

    Args:
        draft_logits: floating [max_num_reqs, num_speculative_steps, >= vocab_size], not divided yet.
        reqs, steps: int [num_rows].
        temperature: float32 [num_rows], not 0.
    """
    logits = draft_logits[torch.from_numpy(reqs.astype(np.int64)), torch.from_numpy(steps.astype(np.int64))]
    return logits[:, :vocab_size].float() / torch.from_numpy(temperature).unsqueeze(1)


def _write_max_and_sumexp(
    logits: torch.Tensor, block_size: int, rows: np.ndarray, local_max: np.ndarray, local_sumexp: np.ndarray
) -> None:
    """Write each block's greatest logit, and the sum of exp(logit - greatest), of float32 [num_rows, vocab_size]."""
    for block, part in enumerate(logits.split(block_size, dim=1)):
        greatest = part.amax(dim=1, keepdim=True)
        sumexp = (part - greatest).exp_().sum(dim=1)
        # A block that is all -inf adds nothing, where its difference to itself is NaN.
        sumexp.masked_fill_(~(greatest[:, 0] > float("-inf")), 0.0)
        local_max[rows, block] = greatest[:, 0].numpy()
        local_sumexp[rows, block] = sumexp.numpy()


def compute_local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Write each block's statistics: for greedy rows the best token, for the others what a softmax is built from.

    Rows behind the last speculative step take part in no verification and are left alone.

    Args:
        target_local_argmax_ptr: int64 [num_logits, num_blocks], written for greedy rows.
        target_local_max_ptr: float32 [num_logits, num_blocks], written.
        target_local_sumexp_ptr: float32 [num_logits, num_blocks], written for random rows.
        draft_local_max_ptr, draft_local_sumexp_ptr: float32 [num_logits, num_blocks], written for random rows if there
            are draft logits.
        target_logits_ptr: floating [num_logits, >= vocab_size], divided by the temperature.
        draft_logits_ptr: floating [max_num_reqs, num_speculative_steps, >= vocab_size], not divided; or None.
        expanded_idx_mapping_ptr, expanded_local_pos_ptr: int [num_logits].
        temp_ptr: float32 [max_num_reqs].
    """
    idx, steps = expanded_idx_mapping_ptr.numpy(), expanded_local_pos_ptr.numpy()
    temperature = temp_ptr.numpy()[idx]
    verified = steps < num_speculative_steps
    local_argmax, local_max = target_local_argmax_ptr.numpy(), target_local_max_ptr.numpy()
    local_sumexp = target_local_sumexp_ptr.numpy()
    draft_max, draft_sumexp = draft_local_max_ptr.numpy(), draft_local_sumexp_ptr.numpy()
    for rows in row_chunks(np.flatnonzero(verified & (temperature == 0.0)), vocab_size):
        logits = target_logits_ptr[torch.from_numpy(rows), :vocab_size]
        block_argmax(float32_array(logits), BLOCK_SIZE, rows, local_argmax, local_max)
    for rows in row_chunks(np.flatnonzero(verified & (temperature != 0.0)), vocab_size):
        logits = target_logits_ptr[torch.from_numpy(rows), :vocab_size].float()
        _write_max_and_sumexp(logits, BLOCK_SIZE, rows, local_max, local_sumexp)
        if draft_logits_ptr is not None:
            drafts = draft_logits_rows(draft_logits_ptr, idx[rows], steps[rows], temperature[rows], vocab_size)
            _write_max_and_sumexp(drafts, BLOCK_SIZE, rows, draft_max, draft_sumexp)


def best_token(local_max: np.ndarray, local_argmax: np.ndarray) -> np.ndarray:
    """The best token over all blocks of each row, a block of NaNs being the worst: int64 [num_rows].

    Args:
        local_max: floating [num_rows, num_blocks].
        local_argmax: int64 [num_rows, num_blocks].
    """
    block = np.where(np.isnan(local_max), -np.inf, local_max).argmax(axis=1)
    return np.take_along_axis(local_argmax, block[:, None], axis=1)[:, 0]


def _log_sum_exp(local_max: torch.Tensor, local_sumexp: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    maxima = local_max.numpy()[rows]
    greatest = maxima.max(axis=1)
    return greatest + np.log((local_sumexp.numpy()[rows] * np.exp(maxima - greatest[:, None])).sum(axis=1))


class Softmaxes(NamedTuple):
    """The distributions that target and draft gave the tokens of random rows. Without draft logits drafts are certain.

    Shapes and dtypes are those of `compute_local_logits_stats`.
    """

    target_logits: torch.Tensor
    target_max: torch.Tensor
    target_sumexp: torch.Tensor
    draft_logits: torch.Tensor | None
    draft_max: torch.Tensor
    draft_sumexp: torch.Tensor

    def target_log_sum_exp(self, rows: np.ndarray) -> np.ndarray:
        """The target's normaliser of each of the rows: float32 [num_rows]."""
        return _log_sum_exp(self.target_max, self.target_sumexp, rows)

    def draft_log_sum_exp(self, rows: np.ndarray) -> np.ndarray:
        """The draft's normaliser of each of the rows, 0 if drafts are certain: float32 [num_rows]."""
        if self.draft_logits is None:
            return np.zeros(rows.shape, dtype=np.float32)
        return _log_sum_exp(self.draft_max, self.draft_sumexp, rows)

    def target_log_probs(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """The target's log-probability of one token in each of the rows: float32 [num_rows].

        Args:
            rows, tokens: int64 [num_rows].
        """
        logits = self.target_logits[torch.from_numpy(rows), torch.from_numpy(tokens)].float().numpy()
        return logits - self.target_log_sum_exp(rows)

    def draft_log_probs(
        self, rows: np.ndarray, reqs: np.ndarray, steps: np.ndarray, temperature: np.ndarray, tokens: np.ndarray
    ) -> np.ndarray:
        """The draft's log-probability of one token in each of the rows: float32 [num_rows].

        Args:
            rows, reqs, steps, tokens: int64 [num_rows].
            temperature: float32 [num_rows].
        """
        if self.draft_logits is None:
            return np.zeros(rows.shape, dtype=np.float32)
        places = torch.from_numpy(reqs), torch.from_numpy(steps), torch.from_numpy(tokens)
        return self.draft_logits[places].float().numpy() / temperature - self.draft_log_sum_exp(rows)
