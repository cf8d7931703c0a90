"""Runs the kernel tests in processes of their own: vLLM decides once in a process whether it has Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return ""


@pytest.mark.parametrize(
    ("folder", "plugin"),
    [
        # Every native kernel against vLLM's own in Triton's interpreter.
        ("reference", "triton_interpreter"),
        # vLLM's launchers on the native kernels, without Triton; and whether vLLM still has these kernels.
        ("native", "registered_kernels"),
    ],
)
@pytest.mark.skipif("cpu" not in _vllm_version(), reason="needs vLLM for the CPU")
def test_cases(folder: str, plugin: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    inherited_path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    cases = Path(__file__).parent / folder
    # A plugin is loaded before any test file, and so before vLLM.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=cases_*.py"]
    command += ["-p", plugin]
    result = subprocess.run(
        [*command, str(cases)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(cases), *inherited_path])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-5_000:]
    assert " passed" in result.stdout
