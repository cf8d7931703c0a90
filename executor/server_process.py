"""A `vllm serve` process with everything it starts: start it, wait for it, stop it, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

# "(EngineCore pid=12) ERROR 01-31 12:00:00 [core.py:1] "
_LOG_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]+\] )?")
# The second form is pydantic's, below a line that says only that something is wrong.
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception): |^\W*(?:\(.*\))? *Value error, ")


class ServerFailedError(RuntimeError):
    """The server ended, or was not ready in time. The message ends with what its log says of it."""


class Process(NamedTuple):
    """One process; a number can be used again, so its start time belongs to its identity."""

    pid: int
    started: int


class _Entry(NamedTuple):
    process: Process
    parent: int
    session: int


def _entries() -> list[_Entry]:
    """Every live process of this machine, read from /proc. Zombies are not alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold spaces and parentheses itself.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] not in "ZX":
            found.append(_Entry(Process(int(stat.parent.name), int(fields[19])), int(fields[1]), int(fields[3])))
    return found


def family_of(pid: int, known: Iterable[Process] = ()) -> set[Process]:
    """The live processes that belong to `pid`: its session, its descendants, and the `known` with theirs.

    A session alone does not do: a process may leave it. Descent alone does not
    do either: it is lost when the process between two others ends.
    """
    entries = _entries()
    family = {e.process for e in entries if e.session == pid or e.process.pid == pid}
    family |= {e.process for e in entries} & set(known)
    while grown := {e.process for e in entries if e.parent in {p.pid for p in family}} - family:
        family |= grown
    return family


class ServerProcess:
    """A server in a session of its own, so that Ctrl-C reaches the caller alone and the caller decides what happens.

    Args:
        command: the command line.
        env: its whole environment.
        log: file for everything that it prints.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._known: set[Process] = set()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The server's exit status, None while it runs."""
        return self._popen.poll()

    def family(self) -> set[Process]:
        """The live processes of this server, also those that once belonged to it and have lost their parents."""
        family = family_of(self.pid, self._known)
        self._known |= family
        return family

    def last_words(self, count: int = 15) -> str:
        """What the log says of a failure: the errors named in it, in their order, else its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        # An error is logged by each process that it passes through, and what follows at exit is noise.
        errors = list(
            dict.fromkeys(
                _LOG_PREFIX.sub("", line).strip() for line in lines if _ERROR.search(line) and " WARNING " not in line
            )
        )
        return "\n".join(f"  | {line}" for line in errors[:count] or lines[-count:])

    def wait_ready(self, health_url: str, timeout: float, tick: Callable[[float], None] = lambda _: None) -> float:
        """Wait until the server answers, and return how many seconds that took.

        Args:
            health_url: address that answers 200 once the server is ready.
            timeout: seconds to wait at most.
            tick: called about twice a second with the seconds so far.

        Raises:
            ServerFailedError: the server ended, or the time is over.
        """
        # The address is this machine's: a proxy from the environment must not be asked.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            if (status := self._popen.poll()) is not None:
                raise ServerFailedError(
                    f"The server ended with status {status} before it was ready. From {self.log}:\n{self.last_words()}"
                )
            try:
                with opener.open(health_url, timeout=2):
                    return waited
            except (urllib.error.URLError, OSError):
                pass
            if waited > timeout:
                raise ServerFailedError(
                    f"The server was not ready after {timeout:.0f} s. From {self.log}:\n{self.last_words()}"
                )
            self.family()
            tick(waited)
            time.sleep(0.5)

    def stop(self, grace: float = 30.0) -> list[str]:
        """Stop the server and everything it started, by force if need be; safe to call twice.

        Args:
            grace: seconds that it gets to end after SIGTERM.

        Returns:
            What did not go as it should, one sentence each; empty if the server ended by itself when asked.
        """
        problems = []
        self.family()
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(grace)
            except subprocess.TimeoutExpired:
                problems.append(f"The server did not end within {grace:.0f} s of SIGTERM and was killed.")
        # Children of an orderly server may take a moment longer than it does.
        if not problems and not self._gone_within(5.0):
            left = ", ".join(str(process.pid) for process in sorted(self.family()))
            problems.append(f"The server ended and left processes running, which were killed: {left}.")
        for sig in (signal.SIGTERM, signal.SIGKILL):
            if self._gone_within(0.0):
                break
            for process in self.family():
                _signal(process, sig)
            self._gone_within(3.0)
        if left_over := self.family():
            problems.append(f"These processes could not be ended: {', '.join(str(p.pid) for p in sorted(left_over))}.")
        return problems

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self._popen.poll()  # a child that nobody waits for stays a zombie
            if not self.family():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def _signal(process: Process, sig: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, sig)
