"""Native version of the kernel in `vllm.v1.worker.gpu.mm.rope`."""

from __future__ import annotations

import torch


def prepare_rope_positions(
    positions_ptr: torch.Tensor,
    positions_stride: int,
    prefill_positions_ptr: torch.Tensor,
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    prefill_delta_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:
    """The positions of a round's tokens in every dimension that the model's rotary embedding has (M-RoPE).

    In its prompt a request's are read from a table that the model has filled;
    behind it they count on, all alike, from where the table ended.

    Args:
        positions_ptr: int64 [NUM_DIMS, max_num_tokens or more], written.
        prefill_positions_ptr: int32 [max_num_reqs x NUM_DIMS, max_model_len].
        prefill_delta_ptr: int32 [max_num_reqs], what a position behind the prompt has over the token's number.
        idx_mapping_ptr: int [num_reqs].
        query_start_loc_ptr: int32 [num_reqs + 1 or more].
        prefill_lens_ptr, num_computed_tokens_ptr: int32 [max_num_reqs].
    """
    positions = positions_ptr.numpy()
    table = prefill_positions_ptr.numpy()
    bounds = query_start_loc_ptr.tolist()
    for row, req in enumerate(idx_mapping_ptr.tolist()):
        start, end = bounds[row], bounds[row + 1]
        first = int(num_computed_tokens_ptr[req])
        last = first + end - start
        if first < int(prefill_lens_ptr[req]):
            positions[:, start:end] = table[NUM_DIMS * req : NUM_DIMS * (req + 1), first:last]
        else:
            delta = int(prefill_delta_ptr[req])
            positions[:, start:end] = range(first + delta, last + delta)
