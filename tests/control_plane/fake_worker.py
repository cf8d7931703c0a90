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
from pathlib import Path
from typing import Any

from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.rounds import RoundDispatcher
from vllm_handoff.scheduler_ext.manifest import Manifest, attach, manifest_of

STAGES = 2
EMPTY = {"empty": True}
MARK = "a deliberate error"


@dataclass
class SchedulerOutput:
    """The fields of vLLM's SchedulerOutput that the control plane reads, and what the fake worker shall do."""

    total_num_scheduled_tokens: int = 1
    has_structured_output_requests: bool = False
    # phase -> what `rank` does in it: one of the words of FakeWorker._do.
    act: dict[str, str] = field(default_factory=dict)
    rank: int = STAGES - 1
    seconds: float = 0.0
    note: Any = None


def with_manifest(output: SchedulerOutput, **fields: Any) -> SchedulerOutput:
    """`output`, with a manifest of these fields attached."""
    fields.setdefault("num_tokens", output.total_num_scheduled_tokens)
    attach(output, Manifest(**fields))
    return output


class AsyncOutput:
    """Like vLLM's AsyncModelRunnerOutput: the output thread fetches the result, unless it is known to be there."""

    def __init__(self, worker: FakeWorker, output: SchedulerOutput, result: dict[str, Any]) -> None:
        self._worker, self._output, self._result = worker, output, result
        if output.note == "arrived":
            self.has_arrived = lambda: True

    def get_output(self) -> dict[str, Any]:
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
        manifest = manifest_of(output)
        self.log.append(("execute", output.note, manifest and manifest.round))
        self.act("execute_model", output)
        if output.total_num_scheduled_tokens == 0 or output.note == "pooled":
            return {"note": output.note, "rank": self.rank}
        self.pending = output
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        output, self.pending = self.pending, None
        assert output is not None
        self.log.append(("sample", output.note, grammar))
        self.act("sample_tokens", output)
        if output.note == "nothing":
            return None
        result = {"note": output.note, "grammar": grammar, "rank": self.rank}
        return AsyncOutput(self, output, result) if self.is_async else result

    def act(self, phase: str, output: SchedulerOutput) -> None:
        if self.rank == output.rank:
            self._do(output.act.get(phase, ""), output.seconds)

    def _do(self, what: str, seconds: float) -> None:
        if what == "raise":
            raise ValueError(MARK)
        if what == "sleep":
            time.sleep(seconds)
        elif what == "compute":
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                pass
        elif what == "block":
            # As a collective would: no Python signal handler gets this thread out.
            while True:
                with contextlib.suppress(BaseException):
                    time.sleep(3600)
        elif what == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "exit":
            os._exit(3)
        elif what == "unpicklable":
            self.log.append((threading.Lock(),))

    def add(self, a: int, b: int = 0) -> int:
        self.log.append(("add", a, b))
        return a + b + self.rank

    def fail_on(self, rank: int, seconds: float = 0.0) -> int:
        if self.rank == rank:
            time.sleep(seconds)
            raise KeyError(MARK)
        return self.rank

    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def get_log(self) -> list[tuple]:
        return self.log

    def unpicklable(self) -> Any:
        return threading.Lock()

    def pid(self) -> int:
        return os.getpid()

    def start_child(self) -> int:
        """The id of a child process that would outlive the worker."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def block(self) -> None:
        self._do("block", 0)

    def shutdown(self) -> None:
        self.log.append(("shutdown",))


def build_fake_worker(worker_class: type[FakeWorker] = FakeWorker, **kwargs: Any) -> FakeWorker:
    return worker_class(**kwargs)


@contextlib.contextmanager
def control_plane(
    world_size: int = STAGES,
    method: str = "fork",
    start_now: bool = True,
    stall_seconds: float = 0,
    **kwargs: Any,
) -> Iterator[ControlPlane]:
    """A control plane with `world_size` fake workers, one a stage; ended on the way out."""
    plane = ControlPlane(
        world_size,
        1,
        build_fake_worker,
        lambda rank: {"rank": rank, **kwargs},
        multiprocessing.get_context(method),
        stall_seconds=stall_seconds,
    )
    try:
        if start_now:
            plane.start()
        yield plane
    finally:
        plane.close()


@contextlib.contextmanager
def rounds(
    timeout: float | None = 60.0, samples: bool = True, **kwargs: Any
) -> Iterator[tuple[RoundDispatcher, ControlPlane]]:
    """A dispatcher of rounds and its control plane."""
    with control_plane(**kwargs) as plane:
        yield RoundDispatcher(plane, plane.world_size - 1, samples, EMPTY, timeout), plane


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether `condition` came true. The limit is only there to end a broken test."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
