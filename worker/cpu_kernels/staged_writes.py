"""Native version of `vllm.v1.worker.gpu.buffer_utils._apply_write_kernel`."""

from __future__ import annotations

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.raw_memory import int32_run


def apply_write(
    output_ptr: torch.Tensor,
    output_stride: int | torch.Tensor,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write runs of values into rows of one tensor, or of one int32 tensor per KV cache group.

    Write i puts contents[cu_lens[i - 1]:cu_lens[i]] into row indices[i], from column starts[i] on. Writes are applied
    in order.

    Args:
        output_ptr: the tensor, contiguous, [num_rows] or [num_rows, row_size]; with MULTI_GROUP the addresses of the
            groups' int32 tensors, uint64 [num_groups].
        output_stride: elements between rows; with MULTI_GROUP int64 [num_groups].
        write_indices_ptr, write_starts_ptr, write_cu_lens_ptr: int32 [num_writes].
        write_contents_ptr: [cu_lens[-1]].
        write_group_ids_ptr: int32 [num_writes] with MULTI_GROUP, else None.
    """
    indices = write_indices_ptr.numpy()
    starts = write_starts_ptr.numpy()
    cu_lens = write_cu_lens_ptr.numpy()
    contents = write_contents_ptr.numpy()
    num_writes = indices.shape[0]
    if num_writes == 0:
        return
    if MULTI_GROUP:
        assert isinstance(output_stride, torch.Tensor) and write_group_ids_ptr is not None
        _apply_to_groups(output_ptr, output_stride, indices, starts, contents, cu_lens, write_group_ids_ptr)
        return

    flat = output_ptr.numpy().reshape(-1)
    # The kernel does the same pointer arithmetic, so a write may run over the end of its row into the next.
    positions = indices.astype(np.int64) * output_stride + starts
    if cu_lens[-1] == num_writes and (num_writes == 1 or int((cu_lens[1:] - cu_lens[:-1]).min()) == 1):
        flat[positions] = contents[:num_writes]
        return
    begin = 0
    for position, end in zip(positions.tolist(), cu_lens.tolist(), strict=True):
        flat[position : position + end - begin] = contents[begin:end]
        begin = end


def _apply_to_groups(
    addresses: torch.Tensor,
    strides: torch.Tensor,
    indices: np.ndarray,
    starts: np.ndarray,
    contents: np.ndarray,
    cu_lens: np.ndarray,
    group_ids: torch.Tensor,
) -> None:
    address_list, stride_list = addresses.tolist(), strides.tolist()
    begin = 0
    writes = zip(group_ids.tolist(), indices.tolist(), starts.tolist(), cu_lens.tolist(), strict=True)
    for group, index, start, end in writes:
        address = address_list[group] + 4 * (index * stride_list[group] + start)
        int32_run(address, end - begin)[:] = contents[begin:end]
        begin = end
