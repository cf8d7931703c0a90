"""What is registered is what vLLM has: names, parameters, and nothing forgotten."""

from __future__ import annotations

import importlib
import inspect
import logging

import pytest
from registered_kernels import ORIGINAL_PARAMETERS
from vllm.triton_utils.dispatcher import KernelOverride

from vllm_handoff.worker.cpu_kernels import register_cpu_kernels
from vllm_handoff.worker.cpu_kernels.registration import GRID_KERNELS, NATIVE_KERNELS

# Launch options that Triton takes beside a kernel's parameters.
LAUNCH_OPTIONS = {"num_warps", "num_stages"}
MODULES = sorted({name.rsplit(".", 1)[0] for name in NATIVE_KERNELS} - {"vllm.v1.worker.utils"})


@pytest.mark.parametrize("name", NATIVE_KERNELS)
def test_parameters_are_the_kernels(name: str) -> None:
    parameters = list(inspect.signature(NATIVE_KERNELS[name]).parameters)
    if name in GRID_KERNELS:
        assert parameters.pop(0) == "grid"
    assert tuple(p for p in parameters if p not in LAUNCH_OPTIONS) == ORIGINAL_PARAMETERS[name]


@pytest.mark.parametrize("name", NATIVE_KERNELS)
def test_kernel_is_replaced(name: str) -> None:
    module_name, attribute = name.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module_name), attribute), KernelOverride)


@pytest.mark.parametrize("module_name", MODULES)
def test_no_kernel_of_a_covered_module_is_forgotten(module_name: str) -> None:
    kernels = {attribute for attribute in vars(importlib.import_module(module_name)) if attribute.endswith("_kernel")}
    assert {f"{module_name}.{kernel}" for kernel in kernels} <= NATIVE_KERNELS.keys()


def test_registering_again_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.v1.worker.gpu import block_table

    before = block_table._gather_block_tables_kernel
    with caplog.at_level(logging.WARNING, logger="vllm"):
        register_cpu_kernels()
    assert block_table._gather_block_tables_kernel is before
    assert not caplog.records
