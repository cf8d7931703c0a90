"""Native versions of the kernels that feed autoregressive draft models: EAGLE, EAGLE3, MTP and independent ones.

They belong to `target_dependent_ar.speculator` and `standalone_ar.speculator` in `vllm.v1.worker.gpu.spec_decode`.

Shapes: num_reqs rows in the batch; max_num_reqs rows in the drafter's own buffers, whose padding is for graphs. The
target's inputs are the round's just run, rejected drafts included: a row's last `num_rejected` tokens. Each
`query_start_loc` is an int32 prefix sum with num_reqs + 1 entries at least.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets


def prepare_draft_prefill(
    last_token_indices_ptr: torch.Tensor,
    draft_current_step_ptr: torch.Tensor,
    draft_input_ids_ptr: torch.Tensor,
    draft_positions_ptr: torch.Tensor,
    draft_query_start_loc_ptr: torch.Tensor,
    draft_seq_lens_ptr: torch.Tensor,
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the first draft step's inputs: each row's tokens moved one place to the left, and its next token behind.

    The places of rejected tokens stay in the row, with what they held: so the target's attention metadata fit.

    Args:
        last_token_indices_ptr: int64 [max_num_reqs], written: the place of each row's next token; padded with 0.
        draft_current_step_ptr: int64 scalar, set to 0.
        draft_input_ids_ptr: int32 [max_num_tokens], written.
        draft_positions_ptr: int64 [max_num_tokens], written: the target's, not moved.
        draft_query_start_loc_ptr: int32 [max_num_reqs + 1], written; padded with the last sum.
        draft_seq_lens_ptr: int32 [max_num_reqs], written: the target's; padded with 0.
        target_input_ids_ptr: int32 [num_tokens or more].
        target_positions_ptr: int64 [num_tokens or more].
        idx_mapping_ptr: int [num_reqs].
        last_sampled_ptr: int64 [max_num_reqs, 1], the next token of rows that sampled one.
        next_prefill_tokens_ptr: int32 [num_lookahead, max_num_reqs], whose first line has the others' next token.
        num_sampled_ptr, num_rejected_ptr: int32 [num_reqs].
        seq_lens_ptr: int32 [num_reqs or more].
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    if num_reqs == 0:
        return
    bounds = query_start_loc_ptr.numpy()[: num_reqs + 1]
    starts = bounds[:-1]
    kept_lens = bounds[1:] - starts - num_rejected_ptr.numpy()[:num_reqs]
    last_tokens = starts + kept_lens - 1
    next_tokens = np.where(
        num_sampled_ptr.numpy()[:num_reqs] > 0,
        last_sampled_ptr.numpy().reshape(-1)[idx],
        next_prefill_tokens_ptr.numpy().reshape(-1)[idx],
    )
    input_ids, positions = draft_input_ids_ptr.numpy(), draft_positions_ptr.numpy()
    rows, offsets = rows_and_offsets(kept_lens)
    places = starts[rows] + offsets
    positions[places] = target_positions_ptr.numpy()[places]
    moved = places[offsets > 0]
    input_ids[moved - 1] = target_input_ids_ptr.numpy()[moved]
    input_ids[last_tokens] = next_tokens

    _fill(last_token_indices_ptr, last_tokens, max_num_reqs, 0)
    _fill(draft_query_start_loc_ptr, bounds, max_num_reqs + 1, bounds[num_reqs])
    _fill(draft_seq_lens_ptr, seq_lens_ptr.numpy()[:num_reqs], max_num_reqs, 0)
    draft_current_step_ptr.fill_(0)


def prepare_draft_decode(
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    target_seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    max_model_len: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Write the second draft step's inputs, one token a row: the first draft.

    Args:
        draft_tokens_ptr: int64 [num_reqs].
        target_seq_lens_ptr: int32 [num_reqs or more].
        num_rejected_ptr: int32 [num_reqs].
        input_ids_ptr: int32 [max_num_tokens], written.
        positions_ptr: int64 [max_num_tokens], one on with ADVANCE_DRAFT_POSITIONS, yet within the model's length.
        sample_src_positions_ptr: int64 [max_num_reqs], one on.
        query_start_loc_ptr: int32 [max_num_reqs + 1], written; padded with num_reqs.
        seq_lens_ptr: int32 [max_num_reqs], written: the target's without rejected tokens, and with the draft if
            ADVANCE_DRAFT_POSITIONS; padded with 0.
    """
    num_reqs = draft_tokens_ptr.shape[0]
    _fill(query_start_loc_ptr, np.arange(num_reqs), max_num_reqs + 1, num_reqs)
    input_ids_ptr.numpy()[:num_reqs] = draft_tokens_ptr.numpy()
    sample_src_positions_ptr.numpy()[:num_reqs] += 1
    seq_lens = target_seq_lens_ptr.numpy()[:num_reqs] - num_rejected_ptr.numpy()[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions_ptr.numpy()[:num_reqs], max_model_len - 1)
        _advance(seq_lens, max_model_len)
    _fill(seq_lens_ptr, seq_lens, max_num_reqs, 0)


def update_draft_inputs(
    output_draft_tokens_ptr: torch.Tensor,
    output_draft_tokens_stride: int,
    next_input_hidden_states_ptr: torch.Tensor,
    next_input_hidden_states_stride: int,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    sample_src_positions_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    current_draft_step_ptr: torch.Tensor,
    hidden_states_ptr: torch.Tensor,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    ADVANCE_DRAFT_POSITIONS: bool,
) -> None:
    """Note a step's drafts and, unless it was the last one, write the next step's inputs.

    Args:
        output_draft_tokens_ptr: int64 [max_num_reqs, >= num_speculative_steps], whose column of this step is written.
        next_input_hidden_states_ptr: floating [max_num_tokens, hidden_size], written.
        input_ids_ptr: int32 [max_num_tokens], written.
        positions_ptr, seq_lens_ptr: int64 [max_num_tokens] and int32 [max_num_reqs], both one on with
            ADVANCE_DRAFT_POSITIONS, yet within the model's length.
        sample_src_positions_ptr: int64 [max_num_reqs], one on.
        draft_tokens_ptr: int64 [num_reqs].
        current_draft_step_ptr: int64 scalar.
        hidden_states_ptr: [num_reqs or more, hidden_size], dtype of `next_input_hidden_states`.
    """
    num_reqs, step = draft_tokens_ptr.shape[0], int(current_draft_step_ptr)
    draft_tokens = draft_tokens_ptr.numpy()
    output_draft_tokens_ptr.numpy()[:num_reqs, step] = draft_tokens
    if step >= num_speculative_steps - 1:
        return
    input_ids_ptr.numpy()[:num_reqs] = draft_tokens
    sample_src_positions_ptr.numpy()[:num_reqs] += 1
    # torch, because NumPy has no bfloat16.
    next_input_hidden_states_ptr[:num_reqs, :hidden_size] = hidden_states_ptr[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions_ptr.numpy()[:num_reqs], max_model_len - 1)
        _advance(seq_lens_ptr.numpy()[:num_reqs], max_model_len)


def prepare_standalone_prefill(
    target_input_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor,
    last_token_indices_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
    BLOCK_SIZE: int,
) -> None:
    """Write an independent draft model's inputs: each row's tokens, the one sampled last behind those not rejected.

    Each row has one place more than the target's, and zeros in those of rejected tokens.

    Args:
        target_input_ids_ptr: int32 [num_tokens or more].
        target_positions_ptr: int64 [num_tokens or more].
        last_sampled_ptr: int32 [max_num_reqs, 1].
        idx_mapping_ptr: int [num_reqs].
        out_input_ids_ptr: int32 [max_num_tokens + max_num_reqs], written.
        out_positions_ptr: int64 [max_num_tokens + max_num_reqs], written: from the target's first one on, yet within
            the model's length.
        last_token_indices_ptr: int64 [max_num_reqs], written: the place of each row's last sampled token; padded
            with 0.
        out_query_start_loc_ptr: int32 [max_num_reqs + 1], written; padded with the last sum.
        out_seq_lens_ptr: int32 [max_num_reqs], written: one more than the target's, yet within the model's length;
            padded with 0.
        seq_lens_ptr: int32 [num_reqs or more].
        num_rejected_ptr: int32 [num_reqs].
    """
    idx = idx_mapping_ptr.numpy()
    num_reqs = idx.shape[0]
    if num_reqs == 0:
        return
    target_bounds = query_start_loc_ptr.numpy()[: num_reqs + 1]
    bounds = target_bounds + np.arange(num_reqs + 1, dtype=np.int32)
    kept_lens = target_bounds[1:] - target_bounds[:-1] - num_rejected_ptr.numpy()[:num_reqs]
    last_tokens = bounds[:-1] + kept_lens

    rows, offsets = rows_and_offsets(bounds[1:] - bounds[:-1])
    written = slice(int(bounds[0]), int(bounds[num_reqs]))
    first_positions = target_positions_ptr.numpy()[target_bounds[:-1]]
    np.minimum(first_positions[rows] + offsets, max_model_len - 1, out=out_positions_ptr.numpy()[written])
    kept = offsets < kept_lens[rows]
    input_ids = out_input_ids_ptr.numpy()
    input_ids[written] = 0
    input_ids[written][kept] = target_input_ids_ptr.numpy()[target_bounds[rows[kept]] + offsets[kept]]
    input_ids[last_tokens] = last_sampled_ptr.numpy().reshape(-1)[idx]

    seq_lens = seq_lens_ptr.numpy()[:num_reqs].copy()
    _advance(seq_lens, max_model_len)
    _fill(last_token_indices_ptr, last_tokens, max_num_reqs, 0)
    _fill(out_query_start_loc_ptr, bounds, max_num_reqs + 1, bounds[num_reqs])
    _fill(out_seq_lens_ptr, seq_lens, max_num_reqs, 0)


def _fill(target: torch.Tensor, values: np.ndarray, size: int, padding: int) -> None:
    """Write the values, then padding up to `size` elements."""
    array = target.numpy()
    array[: values.shape[0]] = values
    array[values.shape[0] : size] = padding


def _advance(values: np.ndarray, highest: int) -> None:
    """Add one to each value, in place, but go no higher than `highest`."""
    values += 1
    np.minimum(values, highest, out=values)
