"""What `vllm-handoff doctor` looks at in the GPUs. torch is asked in another process: CUDA starts there alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from vllm_handoff.executor.doctor_system import Check
from vllm_handoff.executor.version import UnsupportedVllmError, installed_vllm_version

_TIMEOUT_S = 120

# Prints what torch sees, as JSON: names, peer access as a matrix, NCCL's version.
_ASK_TORCH = """
import json, torch
found = {"cuda": torch.version.cuda, "gpus": [], "peer": [], "nccl": None}
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        found["gpus"].append({"name": p.name, "memory": p.total_memory})
    found["peer"] = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def checks(needed: int) -> Iterator[Check]:
    """The driver, the GPUs, peer access between them, and NCCL."""
    try:
        cpu_only = "cpu" in installed_vllm_version()
    except UnsupportedVllmError:
        return
    if cpu_only:
        yield Check("GPUs", "ok", "not needed: this vLLM was built for the CPU, transfers go over gloo")
        return
    driver = _driver()
    if driver is None:
        yield Check(
            "driver",
            "fail",
            "nvidia-smi finds none",
            "install NVIDIA's driver; in a container, ask for GPUs (docker run --gpus all).",
        )
        return
    yield Check("driver", "ok", driver)
    try:
        seen = _ask_torch()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield Check("GPUs", "fail", f"torch does not start ({error})", "mend the installation of torch first.")
        return
    yield from judge(seen, needed)


def judge(seen: dict[str, Any], needed: int) -> Iterator[Check]:
    """Findings from what torch sees."""
    gpus = seen["gpus"]
    names = sorted({gpu["name"] for gpu in gpus})
    found = f"{len(gpus)} x {', '.join(names)} (CUDA {seen['cuda']})" if gpus else "torch sees none"
    if len(gpus) < needed:
        remedy = f"{needed} are needed (stages x tensor-parallel size): look at CUDA_VISIBLE_DEVICES and the driver."
        yield Check("GPUs", "fail", found, remedy)
    elif len(names) > 1:
        yield Check(
            "GPUs", "note", found, "The slowest stage sets the pace: balance it with VLLM_PP_LAYER_PARTITION=N,M."
        )
    else:
        yield Check("GPUs", "ok", found)
    if len(gpus) > 1:
        apart = [(i, j) for i, row in enumerate(seen["peer"]) for j, access in enumerate(row) if not access]
        if apart:
            pairs = ", ".join(f"{i}-{j}" for i, j in apart if i < j) or str(apart)
            yield Check(
                "peer access",
                "note",
                f"none between {pairs}",
                "Transfers go through host memory. In a virtual machine look at the IOMMU (ACS) settings.",
            )
        else:
            yield Check("peer access", "ok", "between all GPUs")
    if seen["nccl"]:
        yield Check("NCCL", "ok", seen["nccl"])
    elif gpus:
        yield Check("NCCL", "fail", "torch has none", "install a build of torch with NCCL.")


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _ask_torch() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no message"])[-1])
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen
