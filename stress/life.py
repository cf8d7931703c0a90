"""One engine life as the harness sees it: a process that it starts, orders, reads, strikes and buries."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from vllm_handoff.executor.server_process import Process, family_of
from vllm_handoff.stress.faults import STRUCK_FILE, parent_of

_SHARED_MEMORY = Path("/dev/shm")
# The control plane's folders; what else lies in the temporary folder belongs to vLLM.
_OURS = "vllm-handoff-*"


class Life:
    """A child process with an engine, in a session and with a temporary folder of its own.

    Args:
        setup: what child.py is to start.
        environment: variables for it.
        log: file for everything that it prints.
    """

    def __init__(self, setup: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.log = log
        # Sockets live there, and a path to one is at most 107 bytes long.
        self.temporary = Path(tempfile.mkdtemp(prefix="stress-", dir="/tmp"))
        read, write = os.pipe()
        with log.open("ab") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "vllm_handoff.stress.child", json.dumps(setup), str(write)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                text=True,
                env={**os.environ, **environment, "TMPDIR": str(self.temporary)},
                start_new_session=True,
            )
        os.close(write)
        self.pids: dict[int, int] = {}
        self._known: set[Process] = set()
        self._shared: set[Path] = set()
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as events:
            for line in events:
                with contextlib.suppress(json.JSONDecodeError):
                    self._queue.put(json.loads(line))
        self._queue.put(None)

    def order(self, order: dict[str, Any]) -> None:
        """Tell the child what to do; nothing happens if it is gone."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.write(json.dumps(order) + "\n")
            self._popen.stdin.flush()

    def event(self, timeout: float) -> dict[str, Any] | None:
        """The next event; {} if none came in time, None if none will ever come."""
        try:
            event = self._queue.get(timeout=max(timeout, 0))
        except queue.Empty:
            return {}
        if event is None:
            self._queue.put(None)
        return event

    def wait_workers(self, count: int, timeout: float) -> bool:
        """Wait until the workers of an engine that starts are there, and learn their ids. False if they do not come.

        Ranks are in the order of the ids: workers are started one after the other.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._popen.poll() is None:
            found = sorted(self._workers())
            if len(found) >= count:
                self.pids = dict(enumerate(found[:count]))
                return True
            time.sleep(0.02)
        return False

    def _workers(self) -> list[int]:
        """Processes two steps below the child: it starts the engine's, and that starts the workers, named alike."""
        parents = {process.pid: parent_of(process.pid) for process in self.look()}
        child = self._popen.pid
        found = [pid for pid, parent in parents.items() if parent in parents and parents[parent] == child]
        # A resource tracker of multiprocessing's is one step up or down, and runs a command line of its own.
        return [pid for pid in found if b"resource_tracker" not in _command_line(pid)]

    def wait_ready(self, timeout: float) -> bool:
        """Wait for the engine, and learn its processes. False if it ended or took too long."""
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            event = self.event(remaining)
            if event is None:
                return False
            if "ready" in event:
                self.pids = {entry["rank"]: entry["pid"] for entry in event["ready"]}
                self.look()
                return True
        return False

    def look(self) -> set[Process]:
        """The live processes of this life; remembered, as is their shared memory."""
        family = family_of(self._popen.pid, self._known)
        self._known |= family
        for process in family:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if f" {_SHARED_MEMORY}/" in line and not line.endswith("(deleted)"):
                        self._shared.add(Path(line[line.index(f"{_SHARED_MEMORY}/") :]))
        return family

    def memory(self) -> dict[int, int]:
        """Resident bytes of each live process of this life."""
        found = {}
        for process in self.look():
            with contextlib.suppress(OSError, IndexError, ValueError):
                pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
                found[process.pid] = int(pages) * os.sysconf("SC_PAGE_SIZE")
        return found

    def wait_gone(self, timeout: float) -> float | None:
        """Seconds until no process of this life was left, None if some still are."""
        begin = time.monotonic()
        while True:
            self._popen.poll()
            if not family_of(self._popen.pid, self._known):
                return time.monotonic() - begin
            if time.monotonic() - begin > timeout:
                return None
            time.sleep(0.05)

    def exit_status(self) -> int | None:
        """How the child ended; None if it does not."""
        try:
            return self._popen.wait(5)
        except subprocess.TimeoutExpired:
            return None

    def struck_at(self) -> float | None:
        """When a fault that was ordered took place (see worker_extension.py); None if its time is not known."""
        with contextlib.suppress(OSError, ValueError):
            return float((self.temporary / STRUCK_FILE).read_text())
        return None

    def leaks(self) -> list[str]:
        """What is left of a life that is over: processes, and files of the executor. vLLM's own are not counted."""
        left = [f"process {process.pid}" for process in sorted(family_of(self._popen.pid, self._known))]
        left += [str(path) for path in self.temporary.glob(_OURS)]
        left += [str(path) for path in sorted(self._shared) if path.exists()]
        return left

    def bury(self) -> None:
        """End whatever is left by force, and remove its files. Can be called again."""
        deadline = time.monotonic() + 20
        while (family := family_of(self._popen.pid, self._known)) and time.monotonic() < deadline:
            for process in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
            self._popen.poll()
        with contextlib.suppress(OSError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        for path in self._shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def last_words(self, count: int = 25) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line[:300]}" for line in lines[-count:])


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
