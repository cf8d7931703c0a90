"""Runs a scenario with vLLM's kernels in Triton's interpreter and with the native ones, and compares the results."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_handoff.worker.cpu_kernels.registration import GRID_KERNELS, NATIVE_KERNELS

RUNNER = "vllm.v1.worker.gpu"
CPU = torch.device("cpu")

Results = dict[str, torch.Tensor]
# Builds its inputs from the generator alone, so that both runs get equal ones, and returns what the kernels wrote.
Scenario = Callable[[np.random.Generator], Results]


class _Launcher:
    """Stands where the kernel stood and counts its launches."""

    def __init__(self, launch: Callable[[Any], Callable[..., Any]]) -> None:
        self._launch = launch
        self.num_launches = 0

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self.num_launches += 1
        return self._launch(grid)


def _native_launch(name: str) -> Callable[[Any], Callable[..., Any]]:
    native = NATIVE_KERNELS[name]
    if name in GRID_KERNELS:
        return lambda grid: lambda *args, **kwargs: native(grid, *args, **kwargs)
    return lambda grid: native


@contextmanager
def _kernels(names: list[str], native: bool) -> Iterator[list[_Launcher]]:
    launchers, originals = [], []
    for name in names:
        module_name, attribute = name.rsplit(".", 1)
        module = importlib.import_module(module_name)
        original = getattr(module, attribute)
        launcher = _Launcher(_native_launch(name) if native else original.__getitem__)
        setattr(module, attribute, launcher)
        launchers.append(launcher)
        originals.append((module, attribute, original))
    try:
        yield launchers
    finally:
        for module, attribute, original in originals:
            setattr(module, attribute, original)


def compare(scenario: Scenario, *kernels: str, seed: int = 0, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that a scenario gives the same results with both versions of the kernels, which it must launch.

    Args:
        scenario: run twice.
        kernels: names in NATIVE_KERNELS, without the leading `vllm.v1.worker.gpu.` where they have it.
        seed: of the scenario's random inputs.
        rtol, atol: 0 asks for equality, NaNs and infinities included.
    """
    names = [name if name.startswith("vllm.") else f"{RUNNER}.{name}" for name in kernels]
    results = []
    for native in (False, True):
        with _kernels(names, native) as launchers:
            results.append(scenario(np.random.default_rng(seed)))
        assert all(launcher.num_launches for launcher in launchers), "the scenario does not launch every kernel"
    expected, got = results
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            got[key], value, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )


def ints(rng: np.random.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Random integers in [low, high)."""
    return torch.from_numpy(rng.integers(low, high, shape)).to(dtype)


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed float32."""
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * scale)


def distinct(rng: np.random.Generator, size: int, high: int) -> torch.Tensor:
    """Different integers in [0, high), int64: an idx_mapping."""
    return torch.from_numpy(rng.permutation(high)[:size].astype(np.int64))


def prefix_sums(lengths: list[int], capacity: int | None = None) -> torch.Tensor:
    """int32 [capacity or len(lengths) + 1], the last sum repeated."""
    sums = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    if capacity is not None:
        sums = np.concatenate((sums, np.full(capacity - len(sums), sums[-1], dtype=np.int32)))
    return torch.from_numpy(sums)
