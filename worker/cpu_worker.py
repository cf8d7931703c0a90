"""The worker on a CPU."""

from __future__ import annotations

import vllm.v1.worker.cpu.shm  # noqa: F401  # isort: skip  # replaces CUDA's streams and events before anything uses them

import vllm.v1.worker.cpu.model_runner as cpu_v2
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_handoff.worker.cpu_kernels import register_cpu_kernels
from vllm_handoff.worker.mixin import HandoffWorkerMixin
from vllm_handoff.worker.runner import ManifestRunnerMixin


class HandoffCPUModelRunner(ManifestRunnerMixin, cpu_v2.CPUModelRunner):
    """The V2 runner on a CPU."""


class HandoffCPUWorker(HandoffWorkerMixin, CPUWorker):
    """vLLM's CPU worker, obeying manifests, with the V2 runner's kernels in native versions."""

    def init_device(self) -> None:
        register_cpu_kernels()
        # Why a patch: vLLM 0.32's CPU worker names the runner class inside
        # init_device. Can go once it asks _make_model_runner, as on a GPU.
        before, cpu_v2.CPUModelRunner = cpu_v2.CPUModelRunner, HandoffCPUModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_v2.CPUModelRunner = before  # type: ignore[misc]
