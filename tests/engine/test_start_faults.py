"""Faults while an engine starts: the error names the stage and the cause, and nothing is left, whatever the phase."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import driver
from engine_process import EngineProcess
from engines import EXECUTOR, IN_PROCESS, SMALL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Phase, what happens, on which rank; and what the error says besides the rank and its stage.
FAULTS = [
    ("init_device", "raise", 0, "start failed in start on rank 0 (stage 0): PlannedError: raised in init_device"),
    ("load_model", "memory", 1, "start failed in start on rank 1 (stage 1): OutOfMemoryError: out of memory in load_m"),
    ("load_model", "kill", 0, "rank 0 (stage 0) was killed by SIGKILL without a report"),
    ("determine_available_memory", "kill", 1, "rank 1 (stage 1) was killed by SIGKILL without a report"),
    ("compile_or_warm_up_model", "raise", 0, "call 'compile_or_warm_up_model' failed on rank 0 (stage 0): PlannedErr"),
    ("compile_or_warm_up_model", "kill", 1, "rank 1 (stage 1) was killed by SIGKILL without a report"),
]


def small_shared_memory(state: driver.State, size: str) -> bool:
    """Give this process a /dev/shm of its own, of this size; False if the system does not let it."""
    import ctypes
    import subprocess

    clone_newns = 0x20000
    if ctypes.CDLL(None).unshare(clone_newns):
        return False
    mount = f"mount --make-rprivate / && mount -t tmpfs -o size={size} none /dev/shm"
    return subprocess.run(["sh", "-c", mount], capture_output=True).returncode == 0


def attempt(state: driver.State, plan: str, limits: dict[int, int] | None = None, **args: Any) -> tuple[str, float]:
    """Start an engine with a fault planned: the error, and how long after it struck the start was over."""
    import os

    import user_classes

    os.environ[user_classes.PLAN] = plan
    for what, limit in (limits or {}).items():
        resource.setrlimit(what, (limit, limit))
    try:
        driver.start(state, **args)
    except Exception as error:
        struck = user_classes.struck_at()
        return f"{type(error).__name__}: {error}", time.monotonic() - (struck or time.monotonic())
    finally:
        del os.environ[user_classes.PLAN]
    return "it started", 0.0


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("start"), IN_PROCESS)
    try:
        yield process
        process.stop()
    finally:
        process.kill()


@pytest.fixture
def args(tiny_llama: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_llama),
        **SMALL,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": EXECUTOR,
        "worker_cls": "user_classes.WorkerWithAPlan",
    }


@pytest.mark.parametrize(("phase", "what", "rank", "wanted"), FAULTS, ids=[f"{f[0]} {f[1]}" for f in FAULTS])
def test_a_start_that_fails(
    process: EngineProcess, args: dict[str, Any], phase: str, what: str, rank: int, wanted: str
) -> None:
    error, seconds = process.run(attempt, f"{phase}:{what}:{rank}", **args)
    assert wanted in error, error
    # Promised are 5 s, and 10 s where a peer has to be let out of a collective; the rest is for a busy machine.
    assert seconds < 30
    # The process goes on and could start another one: nothing of this one is left.
    assert process.children() == set()
    assert not list(process.temporary.glob("vllm-handoff-*"))


def test_then_it_starts(process: EngineProcess, args: dict[str, Any]) -> None:
    error, _ = process.run(attempt, "none:none:0", **args)
    assert error == "it started"
    process.run(driver.end)
    assert process.children() == set()


def test_no_descriptors(tmp_path: Path, args: dict[str, Any]) -> None:
    process = EngineProcess(tmp_path, IN_PROCESS)
    try:
        # vLLM's own import has some open; the sockets and pipes of two workers do not fit any more.
        error, _ = process.run(attempt, "none:none:0", {resource.RLIMIT_NOFILE: 40}, **args)
        assert "Too many open files" in error, error
        assert process.children() == set()
        assert not list(process.temporary.glob("vllm-handoff-*"))
    finally:
        process.kill()


def test_no_shared_memory(tmp_path: Path, args: dict[str, Any]) -> None:
    process = EngineProcess(tmp_path, IN_PROCESS)
    try:
        if not process.run(small_shared_memory, "4k"):
            pytest.skip("this system lets nobody mount a small /dev/shm")
        # The executor's lock takes the only page. vLLM's workers map 8 MB each, and learn that there is nothing
        # behind it when they first write there.
        error, _ = process.run(attempt, "none:none:0", **args)
        assert "was killed by SIGBUS" in error and "/dev/shm is full or too small" in error, error
        assert process.children() == set()
        assert not list(process.temporary.glob("vllm-handoff-*"))
    finally:
        process.kill()
