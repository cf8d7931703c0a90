"""Native versions of the sampler's kernels that forbid or favour single tokens: min-p, logit bias and bad words."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

_NEG_INF = np.float32(-np.inf)


def apply_min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Forbid, in place, tokens less likely than `min_p` times the likeliest one.

    Args:
        logits_ptr: float32 [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens].
        min_p_ptr: float32 [max_num_reqs]; 0 leaves the row alone.
    """
    min_p = min_p_ptr.numpy()[expanded_idx_mapping_ptr.numpy()]
    logits = logits_ptr.numpy()
    for row in np.flatnonzero(min_p != 0.0).tolist():
        values = logits[row]
        values[values < values.max() + np.log(min_p[row])] = _NEG_INF


def apply_logit_bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Apply, in place and in this order: the list of allowed tokens, the logit biases, and the ban on stopping too
    early.

    Stop tokens outside the vocabulary are ignored: vLLM lets a request name them.

    Args:
        logits_ptr: float32 [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens].
        num_allowed_token_ids_ptr, num_logit_bias_ptr, num_stop_token_ids_ptr: int32 [max_num_reqs]; 0 is none.
        allowed_token_ids_ptr, bias_token_ids_ptr, stop_token_ids_ptr: int32 [max_num_reqs, capacity].
        bias_ptr: float32 [max_num_reqs, capacity].
        pos_ptr: int64 [num_tokens], position of the row's input token.
        min_lens_ptr: int32 [max_num_reqs], sequence length before which a request must not stop.
        restore_when_all_masked_ptr: int32 [max_num_reqs]; with CHECK_ALL_MASKED_ROWS, lift the ban of a row that it
            would leave without any token.
    """
    idx = expanded_idx_mapping_ptr.numpy()
    num_allowed = num_allowed_token_ids_ptr.numpy()[idx]
    num_bias = num_logit_bias_ptr.numpy()[idx]
    too_early = pos_ptr.numpy()[: idx.shape[0]] + 1 < min_lens_ptr.numpy()[idx]
    num_stop = np.where(too_early, num_stop_token_ids_ptr.numpy()[idx], 0)
    logits = logits_ptr.numpy()
    allowed_token_ids, stop_token_ids = allowed_token_ids_ptr.numpy(), stop_token_ids_ptr.numpy()
    bias_token_ids, biases = bias_token_ids_ptr.numpy(), bias_ptr.numpy()
    restore_when_all_masked = restore_when_all_masked_ptr.numpy()

    for row in np.flatnonzero((num_allowed > 0) | (num_bias > 0) | (num_stop > 0)).tolist():
        req, values = idx[row], logits[row]
        if num_allowed[row] > 0:
            token_ids = allowed_token_ids[req, : num_allowed[row]]
            kept = values[token_ids]
            values.fill(_NEG_INF)
            values[token_ids] = kept
        if num_bias[row] > 0:
            values[bias_token_ids[req, : num_bias[row]]] += biases[req, : num_bias[row]]
        if num_stop[row] > 0:
            token_ids = stop_token_ids[req, : num_stop[row]]
            token_ids = token_ids[token_ids < vocab_size]
            kept = values[token_ids]
            values[token_ids] = _NEG_INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked[req] and values.max() == _NEG_INF:
                finite = np.isfinite(kept)
                values[token_ids[finite]] = kept[finite]


def apply_bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Forbid, in place, each token that would complete a bad word of which the output already ends with the rest.

    Args:
        logits_ptr: float32 [num_tokens, vocab_size].
        expanded_idx_mapping_ptr: int [num_tokens].
        bad_word_token_ids_ptr: int32 [max_num_reqs, capacity], the words of a request one after another.
        bad_word_offsets_ptr: int32 [max_num_reqs, max_num_bad_words + 1], where each begins.
        num_bad_words_ptr, prompt_len_ptr, total_len_ptr: int32 [max_num_reqs].
        all_token_ids_ptr: int32 [max_num_reqs, max_model_len].
        input_ids_ptr: int32 [num_tokens], each row's input token: drafts from a request's second row on.
        expanded_local_pos_ptr: int32 [num_tokens].
    """
    idx = expanded_idx_mapping_ptr.numpy()
    num_bad_words = num_bad_words_ptr.numpy()[idx]
    logits, local_pos, input_ids = logits_ptr.numpy(), expanded_local_pos_ptr.numpy(), input_ids_ptr.numpy()
    word_tokens, word_offsets = bad_word_token_ids_ptr.numpy(), bad_word_offsets_ptr.numpy()
    all_token_ids = all_token_ids_ptr.numpy()
    prompt_lens, total_lens = prompt_len_ptr.numpy(), total_len_ptr.numpy()
    for row in np.flatnonzero(num_bad_words > 0).tolist():
        req, pos = idx[row], int(local_pos[row])
        offsets = word_offsets[req, : num_bad_words[row] + 1].tolist()
        words = word_tokens[req, : offsets[-1]].tolist()
        longest = max(end - start for start, end in pairwise(offsets))
        total_len = int(total_lens[req])
        first = max(int(prompt_lens[req]), total_len - longest)
        output = all_token_ids[req, first:total_len].tolist() + input_ids[row - pos + 1 : row + 1].tolist()
        for start, end in pairwise(offsets):
            prefix = words[start : end - 1]
            if not prefix or output[-len(prefix) :] == prefix:
                logits[row, words[end - 1]] = _NEG_INF
