"""The worker processes: started together, watched, and ended with all their children."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from vllm_handoff.executor.messages import REPORTED_EXIT, Failure
from vllm_handoff.worker.process import STACKS_SIGNAL, WorkerLaunch, worker_main

logger = logging.getLogger(__name__)

# How long to collect evidence after the first sign of a failure. A stage that
# dies makes its peers fail within milliseconds, and their error ("connection
# closed by peer") must not be taken for the cause.
SETTLE_S = 0.3
# How long a report may take that is known to be under way.
REPORT_S = 5.0
TERMINATE_S = 1.0
# What all workers together get to write their stacks; one takes milliseconds.
_STACKS_S = 0.5
TICK_S = 2.0


class Evidence:
    """What is known of a failure: the fatal reports received, and the processes that exited."""

    def __init__(self, describe_rank: Callable[[int], str]) -> None:
        self._describe_rank = describe_rank
        self.reports: list[tuple[int, Failure]] = []
        # Exit codes by rank, as multiprocessing gives them.
        self.exits: dict[int, int | None] = {}
        self.broken: list[str] = []

    def __bool__(self) -> bool:
        return bool(self.reports or self.exits or self.broken)

    def awaits_report(self) -> bool:
        """Whether a worker has exited that has sent a report, and it is still under way."""
        reporters = {rank for rank, _ in self.reports}
        return any(code == REPORTED_EXIT and rank not in reporters for rank, code in self.exits.items())

    def cause(self) -> str:
        """The root cause in words, with what else failed.

        A process that exited without a report comes first: it could not tell.
        Then the earliest report, then what the executor itself found.
        """
        reporters = {rank for rank, _ in self.reports}
        silent = [(rank, describe_exit(code)) for rank, code in self.exits.items() if rank not in reporters]
        reports = sorted(self.reports, key=lambda entry: entry[1].at)
        lines = [f"{self._describe_rank(rank)} {how} without a report. {where_to_look(how)}" for rank, how in silent]
        for rank, report in reports:
            lines.append(f"{report.where} failed in {report.phase} on {self._describe_rank(rank)}: {report.error}")
        lines.extend(self.broken)
        details = f"\n{reports[0][1].traceback.rstrip()}" if reports and not silent else ""
        also = "".join(f"\nAlso: {line}" for line in lines[1:])
        return lines[0] + details + also


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is None:
        return "ended (its exit status is unknown)"
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-exitcode).name}"
    return f"exited with code {exitcode}"


def where_to_look(how: str) -> str:
    """What to do about a process that ended so."""
    if how.endswith(signal.SIGBUS.name):
        return "Memory that it had mapped has no room: /dev/shm is full or too small (df /dev/shm, --shm-size)."
    return "Look for its last log lines, the kernel's out-of-memory killer and the container's limits."


class Supervisor:
    """Owns the worker processes of one executor.

    Args:
        context: the multiprocessing context (fork or spawn) to start them with.
        describe_rank: a rank's name for messages.
    """

    def __init__(self, context: BaseContext, describe_rank: Callable[[int], str]) -> None:
        self._context = context
        self._describe_rank = describe_rank
        self.processes: list[BaseProcess] = []
        # Its write end lives in this process only: when this process ends, however
        # it ends, every worker reads EOF.
        self._life_reader, self._life_writer = context.Pipe(duplex=False)
        self._watcher: threading.Thread | None = None
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        # Guards the descriptors against use after close(): numbers are used again.
        self._closed = False
        self._lock = threading.Lock()

    def start(self, launch: WorkerLaunch, environment: contextlib.AbstractContextManager) -> None:
        """Start one worker; `environment` is active while its process is created."""
        launch.life = self._life_reader
        if self._context.get_start_method() == "fork":
            # A forked worker that kept the write end would keep itself alive.
            launch.close_fds = (self._life_writer.fileno(), self._wake_reader, self._wake_writer)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=worker_main, args=(launch,), name=f"VllmWorker-{launch.rank}", daemon=True
        )
        with environment:
            process.start()
        self.processes.append(process)

    @property
    def sentinels(self) -> list[int]:
        return [process.sentinel for process in self.processes]

    def exits(self) -> dict[int, int | None]:
        """The exit codes of the processes that have ended, by rank."""
        ended = multiprocessing.connection.wait(self.sentinels, timeout=0)
        found: dict[int, int | None] = {}
        for rank, process in enumerate(self.processes):
            if process.sentinel in ended:
                process.join(timeout=1)
                found[rank] = process.exitcode
        return found

    def stopped(self) -> list[int]:
        """Ranks whose process is stopped by a signal (SIGSTOP): alive, and never going to answer."""
        return [rank for rank, process in enumerate(self.processes) if _process_state(process.pid) == "T"]

    def show_stacks(self) -> None:
        """Make every worker write to its standard error where each of its threads is."""
        running = self._running()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                assert process.pid
                os.kill(process.pid, STACKS_SIGNAL)
            # One after the other: they share that file, and write piece by piece.
            time.sleep(min(_STACKS_S / len(running), 0.1))

    def watch(
        self, on_sign: Callable[[], None], has_work: Callable[[], bool], is_stuck: Callable[[], bool], tick: float
    ) -> None:
        """Call `on_sign`, once and on a thread of its own, at the first sign of a failure.

        A sign is a process that ends, a poke(), a process that stays stopped
        while there is work in flight, or that is_stuck() then.

        Args:
            tick: seconds from one look at the processes to the next, at most TICK_S.
        """

        def watch() -> None:
            stopped_before: list[int] = []
            while not self._stopping:
                if multiprocessing.connection.wait([*self.sentinels, self._wake_reader], timeout=min(tick, TICK_S)):
                    break
                if not has_work():
                    stopped_before = []
                    continue
                stopped = self.stopped()
                if any(rank in stopped_before for rank in stopped):
                    break
                stopped_before = stopped
                # A stage that is stopped is named as such, two looks later.
                if not stopped and is_stuck():
                    break
            if not self._stopping:
                on_sign()

        self._watcher = threading.Thread(target=watch, name="handoff-supervisor", daemon=True)
        self._watcher.start()

    def poke(self) -> None:
        """Make the watching thread act now."""
        with self._lock:
            if not self._closed:
                # Full means that it has been poked already.
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_writer, b"!")

    def stop_watching(self) -> None:
        self._stopping = True
        self.poke()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout=5)

    def end(self, grace: float) -> None:
        """End every worker and its children.

        Workers that were asked to leave get `grace` seconds, then SIGTERM and
        TERMINATE_S, then SIGKILL. With grace 0 it takes under 2 s.
        """
        with self._lock:
            if self._closed:
                return
            self._wait(grace)
            self._signal(signal.SIGTERM)
            self._wait(TERMINATE_S)
            self._signal(signal.SIGKILL)
            self._wait(TERMINATE_S)
            for process in self.processes:
                # A worker's group outlives it if it has left children behind.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    assert process.pid
                    os.killpg(process.pid, signal.SIGKILL)
                process.join(timeout=1)

    def close(self) -> None:
        """Release the descriptors. A worker that is still alive sees its life pipe close and exits."""
        with self._lock:
            self._closed = True
            self._life_writer.close()
            self._life_reader.close()
            os.close(self._wake_writer)
            os.close(self._wake_reader)
            for process in self.processes:
                with contextlib.suppress(ValueError):
                    process.close()

    def _running(self) -> list[BaseProcess]:
        ended = set(multiprocessing.connection.wait(self.sentinels, timeout=0))
        return [process for process in self.processes if process.sentinel not in ended]

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while running := self._running():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=remaining)

    def _signal(self, number: signal.Signals) -> None:
        running = self._running()
        if running and number == signal.SIGKILL:
            names = ", ".join(self._describe_rank(self.processes.index(process)) for process in running)
            logger.warning("Workers that do not end are killed: %s.", names)
        for process in running:
            _signal_group(process.pid, number)


def _signal_group(pid: int | None, number: signal.Signals) -> None:
    """Signal a running worker's process group, or the worker alone if it does not lead one yet."""
    assert pid is not None
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    except PermissionError:
        pass


def _process_state(pid: int | None) -> str:
    """The state letter in /proc/PID/stat, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
