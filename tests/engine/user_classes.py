"""Workers and schedulers that a user might name; some can work and some cannot. Imported by engines only."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_handoff.scheduler_ext.scheduler import HandoffScheduler
from vllm_handoff.worker.cpu_worker import HandoffCPUWorker


class UserWorker(HandoffCPUWorker):
    """One of ours."""


class UserScheduler(HandoffScheduler):
    """One of ours."""


class ForeignWorker(CPUWorker):
    """One that knows nothing of manifests."""


class ForeignScheduler(AsyncScheduler):
    """One that writes no manifests."""


class WorkerThatCannotStart(HandoffCPUWorker):
    """Fails on the last rank when its model is to be loaded; the other ranks wait for it then."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.rank == self.parallel_config.world_size - 1:
            raise OSError("the disk is on fire")
        super().load_model(*args, **kwargs)


not_a_class = 7
