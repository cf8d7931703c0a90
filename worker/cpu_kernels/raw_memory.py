"""Arrays over memory that a launcher names only by its address."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np


class _Window:
    """What NumPy needs to know to make an array of foreign memory."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "version": 3,
        }


def int32_run(address: int, size: int) -> np.ndarray:
    """`size` int32 values at `address`: a writable view, not to be used once the memory's owner is gone."""
    return np.asarray(_Window(address, (size,), "<i4", None))


@lru_cache(maxsize=256)
def int32_rows(address: int, num_rows: int, row_stride: int) -> np.ndarray:
    """The int32 table [num_rows, row_stride] at `address`: a view like that of `int32_run`.

    Caching is sound although the view owns nothing: an address is all that the caller has too, so the same three
    numbers always mean the same bytes.
    """
    return np.asarray(_Window(address, (num_rows, row_stride), "<i4", None))


def byte_rows(address: int, num_rows: int, num_bytes: int, stride: int) -> np.ndarray:
    """uint8 [num_rows, num_bytes], with `stride` bytes from a row to the next: a view like that of `int32_run`."""
    return np.asarray(_Window(address, (num_rows, num_bytes), "|u1", (stride, 1)))


def zero_memory(address: int, num_bytes: int) -> None:
    """Set `num_bytes` bytes from `address` on to zero."""
    ctypes.memset(address, 0, num_bytes)
