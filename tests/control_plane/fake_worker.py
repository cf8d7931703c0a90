"""A worker without a model, and scheduler outputs for it: plain Python, so that a process starts in milliseconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.rounds import RoundDispatcher

STAGES = 2
EMPTY = {"empty": True}


@dataclass
class SchedulerOutput:
    """The fields of vLLM's SchedulerOutput that the control plane reads, and what the fake worker shall do."""

    total_num_scheduled_tokens: int = 1
    has_structured_output_requests: bool = False
    # phase -> what to do in it, on `rank`: "raise", "sleep", "block", "sigkill", "exit"
    act: dict[str, str] = field(default_factory=dict)
    rank: int = 1
    seconds: float = 0.0
    note: Any = None


class AsyncOutput:
    """Like vLLM's AsyncModelRunnerOutput: the result is fetched on the output thread."""

    def __init__(self, worker: FakeWorker, output: SchedulerOutput, result: Any) -> None:
        self._worker, self._output, self._result = worker, output, result

    def get_output(self) -> Any:
        self._worker.act("get_output", self._output)
        return {**self._result, "thread": threading.current_thread().name}


class FakeWorker:
    """Records what it is called with; misbehaves when told to."""

    def __init__(self, rank: int, is_async: bool = False, start: dict[int, str] | None = None) -> None:
        self.rank = rank
        self.is_async = is_async
        self.log: list[tuple] = []
        self.pending: SchedulerOutput | None = None
        self._do((start or {}).get(rank, ""), 0)

    def execute_model(self, output: SchedulerOutput) -> Any:
        self.log.append(("execute", getattr(output, "handoff_manifest", None) and output.handoff_manifest.round))
        self.act("execute_model", output)
        if output.total_num_scheduled_tokens == 0 or output.note == "pooling":
            return {"executed": output.note, "rank": self.rank}
        self.pending = output
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        self.log.append(("sample", grammar))
        output, self.pending = self.pending, None
        assert output is not None
        self.act("sample_tokens", output)
        if output.note == "none":
            return None
        result = {"note": output.note, "grammar": grammar, "rank": self.rank}
        return AsyncOutput(self, output, result) if self.is_async else result

    def act(self, phase: str, output: SchedulerOutput) -> None:
        if self.rank == output.rank:
            self._do(output.act.get(phase, ""), output.seconds)

    def _do(self, what: str, seconds: float) -> None:
        if what == "raise":
            raise ValueError("a deliberate error")
        if what == "sleep":
            time.sleep(seconds)
        elif what == "block":
            # As a collective would: in a call that no Python signal handler interrupts for good.
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(3600)
        elif what == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "exit":
            os._exit(3)

    def add(self, a: int, b: int = 0) -> int:
        self.log.append(("add", a, b))
        return a + b + self.rank

    def wait_and_raise(self, rank: int, seconds: float = 0.0) -> int:
        if self.rank == rank:
            time.sleep(seconds)
            raise KeyError("no such thing")
        return self.rank

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def get_log(self) -> list[tuple]:
        return self.log

    def pid(self) -> int:
        return os.getpid()

    def open_fds(self) -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    def start_child(self) -> int:
        """A child process that would outlive the worker."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def shutdown(self) -> None:
        pass


def build_fake_worker(**kwargs: Any) -> FakeWorker:
    return FakeWorker(**kwargs)


@contextlib.contextmanager
def control_plane(
    world_size: int = STAGES, method: str = "fork", start: bool = True, **kwargs: Any
) -> Iterator[ControlPlane]:
    plane = ControlPlane(
        world_size,
        1,
        build_fake_worker,
        lambda rank: {"rank": rank, **kwargs},
        multiprocessing.get_context(method),
    )
    try:
        if start:
            plane.start()
        yield plane
    finally:
        plane.close()


@contextlib.contextmanager
def dispatcher(timeout: float | None = 60.0, samples: bool = True, **kwargs: Any) -> Iterator[RoundDispatcher]:
    with control_plane(**kwargs) as plane:
        rounds = RoundDispatcher(plane, plane.world_size - 1, samples, EMPTY, timeout)
        rounds.plane = plane  # type: ignore[attr-defined]
        yield rounds


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
