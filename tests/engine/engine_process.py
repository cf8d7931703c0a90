"""A process that holds an engine and runs a test's functions in it.

Importing vLLM takes longer than starting a small engine, so it is imported
once, in a fork server, and every engine lives in a fork of that: in a session
of its own, with a hard limit on every step, and with nothing left afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_handoff.executor.server_process import Process, family_of

# What every engine imports, except what changes vLLM on import (its CPU worker, V2 runner).
_IMPORTS = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.model_executor.models.llama",
    "vllm_handoff.executor.executor",
]
# The engine's log is shown when something goes wrong, as much of it as helps.
_LOG_LINES = 40


class EngineProcessError(AssertionError):
    """A function raised inside the engine's process, the process ended, or it took too long."""


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Takes effect when the server starts, that is, before its first child.
    context.set_forkserver_preload(_IMPORTS)
    return context


class EngineProcess:
    """Runs functions, one at a time, in a process that keeps what they make.

    Args:
        folder: for the log, and for temporary files of the process and its children.
        environment: variables to set in the process before anything else.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = folder / "engine.log"
        # Sockets live there, and a path to one is at most 107 bytes long.
        self.temporary = Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp"))
        context = _context()
        self._pipe, theirs = context.Pipe()
        variables = {
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            **(environment or {}),
        }
        self._process = context.Process(target=_serve, args=(theirs, self.log, variables), name="test-engine")
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._known: set[Process] = set()
        self._folders: set[str] = set()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> Any:
        """The result of `function(state, *args, **kwargs)`, where `state` is a dict that lives as long as the process.

        Raises:
            EngineProcessError: it raised (with its traceback), or was not done after `timeout` seconds.
        """
        __tracebackhide__ = True
        self._pipe.send((function, args, kwargs))
        if not self._pipe.poll(timeout):
            self.kill()
            raise EngineProcessError(f"{function.__name__} was not done after {timeout:.0f} s.\n{self._last_words()}")
        self.family()
        self._note_folders()
        try:
            ok, result = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise EngineProcessError(
                f"The process ended with {self._process.exitcode} in {function.__name__}.\n{self._last_words()}"
            ) from None
        if not ok:
            raise EngineProcessError(f"{result}\n{self._last_words()}")
        return result

    def family(self) -> set[Process]:
        """The live processes that belong to this one, itself included."""
        family = family_of(self.pid, self._known)
        self._known |= family
        return family

    def children(self) -> set[Process]:
        """The live processes that this one has started."""
        return {process for process in self.family() if process.pid != self.pid}

    def stop(self, timeout: float = 30) -> None:
        """End the process in an orderly way, and check that nothing of it is left.

        Raises:
            EngineProcessError: it did not end by itself, or left a process, a file or shared memory behind.
        """
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(timeout)
        problems = []
        if self._process.exitcode != 0:
            problems.append(f"it ended with {self._process.exitcode}")
        if not _within(5, lambda: not self.family()):
            problems.append(f"it left processes: {sorted(self.family())}")
        # vLLM's front end leaves the sockets of its own there, so only the executor's part counts.
        if left := [*self.temporary.glob("vllm-handoff-*"), *self._shared_memory()]:
            problems.append(f"it left files: {[str(path) for path in left]}")
        self.kill()
        if problems:
            raise EngineProcessError(f"After the engine's end: {'; '.join(problems)}.\n{self._last_words()}")

    def kill(self) -> None:
        """End the process and everything that it started, by force. Can be called again."""
        while family := self.family():
            for process in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process.join(5)
        self._pipe.close()
        for path in self._shared_memory():
            path.unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _note_folders(self) -> None:
        self._folders |= {path.name for path in self.temporary.iterdir() if path.is_dir()}

    def _shared_memory(self) -> list[Path]:
        # vLLM names it after the file of the rendezvous, and the executor that one after its folder.
        return [path for path in Path("/dev/shm").iterdir() if any(folder in path.name for folder in self._folders)]

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"The end of its log ({self.log}):\n" + "\n".join(line[:300] for line in lines[-_LOG_LINES:])


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _serve(pipe: Connection, log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    # What was imported lives on: vLLM collects garbage five times while a model is loaded, half a second each.
    gc.freeze()
    os.environ.update(environment)
    tempfile.tempdir = None
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    state: dict[str, Any] = {}
    try:
        while (order := pipe.recv()) is not None:
            function, args, kwargs = order
            try:
                answer = True, function(state, *args, **kwargs)
            except Exception:
                answer = False, traceback.format_exc()
            if not answer[0]:
                # What failed is in cycles with its own traceback.
                gc.collect()
            pipe.send(answer)
    except EOFError:
        pass  # the test process is gone
    state.clear()
    sys.stdout.flush()
