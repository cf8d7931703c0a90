"""pytest plugin: makes vLLM's Triton kernels run in Triton's interpreter, in this process only.

Triton has no backend for a CPU, so vLLM would replace Triton by placeholders there. The interpreter compiles nothing,
and a backend that has no more than a name is enough for it. It must be loaded before vLLM, in a process of its own: a
process that sees the backend without the interpreter cannot run vLLM at all.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class NameOnlyDriver:
    """Answers what vLLM and Triton ask while they are imported."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


backends.clear()
backends["cpu"] = Backend(compiler=None, driver=NameOnlyDriver)


def _with_bool_mask(store: Any) -> Any:
    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        return store(self, ptrs, value, TensorHandle(mask.data.astype(np.bool_), mask.dtype), *args)

    return masked_store


# `scalar & block` of two conditions is int32 in the interpreter, which then refuses it as a mask.
InterpreterBuilder.create_masked_store = _with_bool_mask(InterpreterBuilder.create_masked_store)


def _log1p(value: Any) -> Any:
    return tl.tensor(TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type)


# Of a device's own functions the interpreter has none: they return None there.
libdevice.log1p = _log1p

# Before any module of the runner: it puts CPU versions of streams, events and buffers in their place.
import vllm.v1.worker.cpu.shm  # noqa: E402, F401
from vllm.triton_utils import HAS_TRITON  # noqa: E402

assert HAS_TRITON, "vLLM did not accept Triton's interpreter"
