"""Small arrays that the host fills and the device reads in place, without a copy to wait for or to launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class HostArrays:
    """Arrays of int64, used in turns.

    On a GPU they lie in pinned memory that the device reads where it is. What
    `put` returned must have been read by the device before `count` further
    calls; who uses it sees to that.

    Args:
        size: most elements of an array.
        count: how many arrays may be in use at once.
    """

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        self._pool = None
        if device.type == "cuda":
            from vllm.v1.worker.gpu.buffer_utils import UvaBufferPool

            self._pool = UvaBufferPool(size, torch.int64, count)

    def put(self, values: np.ndarray | Sequence[int]) -> torch.Tensor:
        """`values` as an int64 tensor for the device."""
        if self._pool is not None:
            return self._pool.copy_to_uva(values)
        return torch.tensor(values, dtype=torch.int64)
