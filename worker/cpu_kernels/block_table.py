"""Native versions of the kernels in `vllm.v1.worker.gpu.block_table` and `vllm.v1.worker.gpu.cp_utils`.

The runner names a KV cache group's block table by its address, so the tables are read through `raw_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.raw_memory import int32_rows
from vllm_handoff.worker.cpu_kernels.segments import rows_and_offsets


def gather_block_tables(
    grid: Sequence[int],
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the block ids of the batch's requests into batch order; zero the padding rows.

    Args:
        grid: the launch grid, (num_groups, num_reqs_padded). Nothing else says how many padding rows there are.
        batch_idx_to_req_idx: int [num_reqs].
        src_block_table_ptrs, dst_block_table_ptrs: uint64 [num_groups], addresses of int32 [rows, stride] tables.
            Destination columns after a request's blocks keep what they held.
        block_table_strides: int64 [num_groups], columns of each group's tables.
        num_blocks_ptr: int32 [num_groups, max_num_reqs].
    """
    num_padded = int(grid[1])
    idx = batch_idx_to_req_idx.numpy()[:num_reqs]
    num_blocks = num_blocks_ptr.numpy()
    tables = zip(
        src_block_table_ptrs.tolist(),
        dst_block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        num_blocks,
        strict=True,
    )
    for src_address, dst_address, stride, group_num_blocks in tables:
        dst = int32_rows(dst_address, num_padded, stride)
        if num_padded > num_reqs:
            dst[num_reqs:] = 0
        if num_reqs == 0:
            continue
        src = int32_rows(src_address, group_num_blocks.shape[0], stride)
        counts = group_num_blocks[idx]
        width = int(counts.max())
        in_use = np.arange(width) < counts[:, None]
        np.copyto(dst[:num_reqs, :width], src[idx, :width], where=in_use)


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write the KV cache slot of each token, and PAD_ID after the last token and for requests without blocks.

    Args:
        idx_mapping: int [num_reqs]; a negative entry marks a request that owns no blocks.
        query_start_loc: int32 [num_reqs + 1 or more].
        pos: int64 [num_tokens or more], positions within the request.
        block_table_ptrs: uint64 [num_groups], addresses of int32 [max_num_reqs, stride] tables.
        block_table_strides: int64 [num_groups].
        block_sizes: int32 [num_groups], tokens a block.
        slot_mapping_enabled, dcp_sharded: bool [num_groups].
        slot_mappings_ptr: int64 [num_groups, max_num_tokens], written.
    """
    idx = idx_mapping.numpy()
    num_reqs = idx.shape[0]
    bounds = query_start_loc.numpy()[: num_reqs + 1]
    begin, end = int(bounds[0]), int(bounds[num_reqs])
    slots = slot_mappings_ptr.numpy()
    slots[:, end:max_num_tokens] = PAD_ID
    if num_reqs == 0 or end == begin:
        return

    if end - begin == num_reqs and np.array_equal(bounds, np.arange(begin, end + 1)):
        reqs = idx
    else:
        reqs = idx[rows_and_offsets(bounds[1:] - bounds[:-1])[0]]
    positions = pos.numpy()[begin:end]
    max_req = int(idx.max())
    has_blocks = None if int(idx.min()) >= 0 else reqs >= 0
    groups = zip(
        block_table_ptrs.tolist(),
        block_table_strides.tolist(),
        block_sizes.tolist(),
        slot_mapping_enabled.tolist(),
        dcp_sharded.tolist(),
        slots,
        strict=True,
    )
    for address, stride, block_size, enabled, sharded, group_slots in groups:
        if not enabled or max_req < 0:
            group_slots[begin:end] = PAD_ID
            continue
        local_positions, is_local = positions, None
        if CP_SIZE != 1 and sharded:
            local_positions, is_local = _context_parallel_positions(
                positions, block_size, cp_rank, CP_SIZE, CP_INTERLEAVE
            )
        table = int32_rows(address, max_req + 1, stride)
        block_indices, block_offsets = np.divmod(local_positions, block_size)
        # A request without blocks reads row -1, that is the last row in view, and the result is thrown away below.
        group_slots[begin:end] = table[reqs, block_indices].astype(np.int64) * block_size + block_offsets
        if is_local is not None:
            group_slots[begin:end][~is_local] = PAD_ID
        if has_blocks is not None:
            group_slots[begin:end][~has_blocks] = PAD_ID


def _context_parallel_positions(
    positions: np.ndarray, block_size: int, cp_rank: int, cp_size: int, interleave: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions within this rank's share of the KV cache, and which tokens are in that share."""
    virtual_blocks, virtual_offsets = np.divmod(positions, block_size * cp_size)
    is_local = virtual_offsets // interleave % cp_size == cp_rank
    rounds = virtual_offsets // (interleave * cp_size)
    return virtual_blocks * block_size + rounds * interleave + virtual_offsets % interleave, is_local


def dcp_local_seq_lens(
    out_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    num_reqs: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write how many tokens of each sequence this context-parallel rank holds.

    Args:
        out_ptr: int32 [max_num_reqs], written; 0 for padding rows.
        seq_lens_ptr: int32 [num_reqs or more].
    """
    rounds, remainder = np.divmod(seq_lens_ptr.numpy()[:num_reqs], dcp_size * cp_interleave)
    remainder = np.clip(remainder - dcp_rank * cp_interleave, 0, cp_interleave)
    out = out_ptr.numpy()
    out[:num_reqs] = rounds * cp_interleave + remainder
    out[num_reqs:max_num_reqs] = 0
