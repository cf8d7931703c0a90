"""Native version of the kernel in `vllm.v1.worker.gpu.model_states.prompt_embeds`."""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.raw_memory import byte_rows


def apply_prompt_embeds(
    inputs_embeds_ptr: torch.Tensor,
    inputs_embeds_stride: int,
    embeds_ptrs_ptr: torch.Tensor,
    mask_ptrs_ptr: torch.Tensor,
    embeds_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    hidden_size: int,
    TOKEN_BLOCK: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the scheduled part of the embeddings that requests brought along over those looked up from token ids.

    Args:
        inputs_embeds_ptr: floating [max_num_tokens, hidden_size], written.
        embeds_ptrs_ptr: uint64 [max_num_reqs], addresses of contiguous [embeds_len, hidden_size] of the same dtype.
        mask_ptrs_ptr: uint64 [max_num_reqs], addresses of uint8 [embeds_len], nonzero where the prompt has a token id
            instead; address 0 means nowhere.
        embeds_lens_ptr, num_computed_tokens_ptr: int32 [max_num_reqs]; length 0 is a request without embeddings.
        idx_mapping_ptr: int [num_reqs].
        query_start_loc_ptr: int32 [num_reqs + 1 or more].
    """
    idx = idx_mapping_ptr.numpy()
    remaining = embeds_lens_ptr.numpy()[idx] - num_computed_tokens_ptr.numpy()[idx]
    bounds = query_start_loc_ptr.tolist()
    row_bytes = hidden_size * inputs_embeds_ptr.element_size()
    stride_bytes = inputs_embeds_stride * inputs_embeds_ptr.element_size()
    base = inputs_embeds_ptr.data_ptr()
    for row in np.flatnonzero(remaining > 0).tolist():
        req = int(idx[row])
        first = int(num_computed_tokens_ptr[req])
        count = min(bounds[row + 1] - bounds[row], int(remaining[row]))
        source = byte_rows(int(embeds_ptrs_ptr[req]) + first * row_bytes, count, row_bytes, row_bytes)
        target = byte_rows(base + bounds[row] * stride_bytes, count, row_bytes, stride_bytes)
        mask_address = int(mask_ptrs_ptr[req])
        if mask_address == 0:
            target[:] = source
        else:
            has_embedding = byte_rows(mask_address + first, count, 1, 1)[:, 0] == 0
            target[has_embedding] = source[has_embedding]
