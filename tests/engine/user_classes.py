"""Workers and schedulers that a user might name; some can work and some cannot. Imported by engines only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
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


# Variable with "phase:what:rank": the fault of a WorkerWithAPlan.
PLAN = "HANDOFF_TEST_PLAN"


class PlannedError(RuntimeError):
    """Raised because a test wants it."""


def _note() -> Path:
    return Path(os.environ["TMPDIR"]) / "struck"


def struck_at() -> float | None:
    """When the last fault struck, by the machine's monotonic clock."""
    note = _note()
    if not note.exists():
        return None
    at = float(note.read_text())
    note.unlink()
    return at


class WorkerWithAPlan(HandoffCPUWorker):
    """Meets with its fault in the planned phase of its start."""

    def _meet(self, phase: str) -> None:
        planned, what, rank = os.environ.get(PLAN, "none:none:0").split(":")
        if phase != planned or self.rank != int(rank):
            return
        _note().write_text(str(time.monotonic()))
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "memory":
            raise torch.OutOfMemoryError(f"out of memory in {phase}")
        raise PlannedError(f"raised in {phase}")

    def init_device(self) -> None:
        self._meet("init_device")
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self._meet("load_model")
        super().load_model(*args, **kwargs)

    def determine_available_memory(self) -> int:
        self._meet("determine_available_memory")
        return super().determine_available_memory()

    def compile_or_warm_up_model(self) -> Any:
        self._meet("compile_or_warm_up_model")
        return super().compile_or_warm_up_model()


not_a_class = 7
