"""Arrays over memory that a launcher names only by its address."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np


class _Int32Window:
    """What NumPy needs to know to make an array of foreign memory."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<i4", "version": 3}


def int32_run(address: int, size: int) -> np.ndarray:
    """`size` int32 values at `address`: a writable view, not to be used once the memory's owner is gone."""
    return np.asarray(_Int32Window(address, (size,)))


@lru_cache(maxsize=256)
def int32_rows(address: int, num_rows: int, row_stride: int) -> np.ndarray:
    """The int32 table [num_rows, row_stride] at `address`: a view like that of `int32_run`.

    Caching is sound although the view owns nothing: an address is all that the caller has too, so the same three
    numbers always mean the same bytes.
    """
    return np.asarray(_Int32Window(address, (num_rows, row_stride)))


def zero_memory(address: int, num_bytes: int) -> None:
    """Set `num_bytes` bytes from `address` on to zero."""
    ctypes.memset(address, 0, num_bytes)
