"""The worker on a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_handoff.worker.mixin import HandoffWorkerMixin
from vllm_handoff.worker.rendezvous import widen_queues


class HandoffWorker(HandoffWorkerMixin, Worker):
    """vLLM's GPU worker, obeying manifests."""

    def init_device(self) -> None:
        widen_queues()
        super().init_device()

    def _make_model_runner(self) -> Any:
        from vllm_handoff.worker.runner import HandoffModelRunner

        return HandoffModelRunner(self.vllm_config, self.device)
