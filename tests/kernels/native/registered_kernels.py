"""pytest plugin: registers the native kernels as a worker does, before anything imports the runner."""

from __future__ import annotations

import importlib
import inspect
import sys

# Before the runner's modules: it puts CPU versions of streams, events and buffers in their place.
import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip
from vllm.triton_utils import HAS_TRITON

from vllm_handoff.worker.cpu_kernels import register_cpu_kernels
from vllm_handoff.worker.cpu_kernels.registration import NATIVE_KERNELS

assert not HAS_TRITON
assert "vllm.v1.worker.gpu.model_runner" not in sys.modules


def _original_parameters(name: str) -> tuple[str, ...]:
    module_name, attribute = name.rsplit(".", 1)
    return tuple(inspect.signature(getattr(importlib.import_module(module_name), attribute)).parameters)


# Parameter names of vLLM's own kernels: without Triton they are plain functions.
ORIGINAL_PARAMETERS = {name: _original_parameters(name) for name in NATIVE_KERNELS}

register_cpu_kernels()
