"""Native versions of the kernels in `vllm.v1.worker.gpu.sample.penalties`."""

from __future__ import annotations

import numpy as np
import torch


def _token_ids_in_bitmask(words: np.ndarray) -> np.ndarray:
    """The numbers of the bits that are set in int32 [num_words], 32 token ids a word."""
    nonzero = np.flatnonzero(words)
    bits = np.unpackbits(words[nonzero].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(bits)
    return nonzero[word] * 32 + bit


def apply_penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Apply repetition, frequency and presence penalties to the logits in place. Only tokens seen before are touched.

    Args:
        logits_ptr: float32 [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens].
        token_ids_ptr: int32 [num_tokens], each logits row's input token; a draft counts for the rows after it.
        expanded_local_pos_ptr: int32 [num_tokens], the row's place among its request's rows.
        repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr: float32 [max_num_reqs].
        prompt_bin_mask_ptr: int32 [max_num_reqs, ceil(vocab_size / 32)], a bit per token of the prompt.
        output_bin_counts_ptr: int32 [max_num_reqs, vocab_size].
    """
    idx = expanded_idx_mapping_ptr.numpy()
    repetition = repetition_penalty_ptr.numpy()[idx]
    frequency = frequency_penalty_ptr.numpy()[idx]
    presence = presence_penalty_ptr.numpy()[idx]
    local_pos = expanded_local_pos_ptr.numpy()
    token_ids = token_ids_ptr.numpy()
    logits = logits_ptr.numpy()
    bin_counts = output_bin_counts_ptr.numpy()
    prompt_masks = prompt_bin_mask_ptr.numpy()
    for row in np.flatnonzero((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)).tolist():
        req, pos = idx[row], int(local_pos[row])
        all_counts = bin_counts[req]
        if pos > 0:
            all_counts = all_counts.copy()
            np.add.at(all_counts, token_ids[row - pos + 1 : row + 1], 1)
        in_output = np.flatnonzero(all_counts > 0)
        row_logits = logits[row]
        if repetition[row] != 1.0:
            in_prompt = _token_ids_in_bitmask(prompt_masks[req])
            seen = np.concatenate((in_output, in_prompt[all_counts[in_prompt] <= 0]))
            values = row_logits[seen]
            row_logits[seen] = values * np.where(values > 0, np.float32(1.0) / repetition[row], repetition[row])
        counts = all_counts[in_output].astype(np.float32)
        row_logits[in_output] = row_logits[in_output] - frequency[row] * counts - presence[row]


def bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Add each request's prompt tokens to its bit mask, and the output tokens it was resumed with to its counts.

    Args:
        expanded_idx_mapping_ptr: int [num_reqs].
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        prompt_len_ptr, prefill_len_ptr: int32 [max_num_reqs].
        prompt_bin_mask_ptr: int32 [max_num_reqs, ceil(vocab_size / 32)], updated.
        output_bin_counts_ptr: int32 [max_num_reqs, vocab_size], updated.
    """
    all_token_ids = all_token_ids_ptr.numpy()
    prompt_lens, prefill_lens = prompt_len_ptr.numpy(), prefill_len_ptr.numpy()
    prompt_masks, bin_counts = prompt_bin_mask_ptr.numpy(), output_bin_counts_ptr.numpy()
    for req in expanded_idx_mapping_ptr.tolist():
        prompt_len, prefill_len = int(prompt_lens[req]), int(prefill_lens[req])
        in_prompt = np.zeros(prompt_masks.shape[1] * 32, dtype=np.uint8)
        in_prompt[all_token_ids[req, :prompt_len]] = 1
        prompt_masks[req] |= np.packbits(in_prompt, bitorder="little").view(np.int32)
        np.add.at(bin_counts[req], all_token_ids[req, prompt_len:prefill_len], 1)
