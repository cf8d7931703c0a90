"""Pickles of vLLM's objects for payload frames."""

from __future__ import annotations

import copyreg
import pickle
import sys
from collections import ChainMap
from functools import cache
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    import torch


class _Pieces(list["bytes | PickleBuffer"]):
    """What a pickler writes, large buffers as they are."""

    write = list.append


def dumps(value: Any) -> bytes:
    """Pickle by reference; functions and classes that have no importable name go by value."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def pieces(value: Any) -> list[bytes | PickleBuffer]:
    """A pickle as pieces to be put one after the other. The contents of tensors and arrays are not copied.

    Why not PyTorch's own way: it writes an archive that is copied three times.
    """
    try:
        written = _Pieces()
        pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
        if "torch" in sys.modules:
            pickler.dispatch_table = _dispatch_table()
        pickler.dump(value)
        return written
    except (pickle.PicklingError, AttributeError, TypeError):
        return [dumps(value)]


@cache
def _dispatch_table() -> Any:
    import torch

    return ChainMap({torch.Tensor: _reduce_tensor}, copyreg.dispatch_table)  # type: ignore[arg-type]


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    import torch

    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (PickleBuffer(flat), tensor.dtype, tuple(tensor.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
