"""Native version of the kernel in `vllm.v1.worker.utils` that clears KV cache blocks."""

from __future__ import annotations

import torch

from vllm_handoff.worker.cpu_kernels.raw_memory import zero_memory

_INT32_BYTES = 4


def zero_kv_blocks(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Zero the given blocks in every segment of the KV cache.

    Args:
        seg_addrs_ptr: uint64 [num_segments], addresses of the segments' block 0.
        seg_block_strides_ptr: int64 [num_segments], 4-byte elements from a block to the next.
        seg_page_sizes_ptr: int64 [num_segments], 4-byte elements a block.
        block_ids_ptr: int64 [num_blocks].
    """
    block_ids = block_ids_ptr.tolist()
    segments = zip(seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True)
    for address, block_stride, page_size in segments:
        for block_id in block_ids:
            zero_memory(address + block_id * block_stride * _INT32_BYTES, page_size * _INT32_BYTES)
