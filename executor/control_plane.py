"""The control plane of one executor: its workers, the command stream to them, the replies, and the failure path.

Knows nothing of vLLM. rounds.py speaks rounds on top of it, and
executor.py is vLLM's interface to both.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import zmq

from vllm_handoff.executor import messages, pickling
from vllm_handoff.executor.board import STAGES_BOARD, Board, BoardReader, WorkerCounts, worker_board
from vllm_handoff.executor.calls import CallFuture, CallTable
from vllm_handoff.executor.channel import DESCRIPTORS, DESCRIPTORS_A_WORKER, ControlChannel
from vllm_handoff.executor.descriptors import require_descriptors
from vllm_handoff.executor.errors import ExecutorFailedError, WorkerStartError
from vllm_handoff.executor.folder import ControlFolder, remove_folder
from vllm_handoff.executor.messages import ALL_RANKS, Call, Command, Failure, Ready, Shutdown
from vllm_handoff.executor.shared_payload import SharedPayload
from vllm_handoff.executor.stall import StallWatch, processor_ns_of_group
from vllm_handoff.executor.stats import StageProgress
from vllm_handoff.executor.supervisor import REPORT_S, SETTLE_S, TICK_S, Evidence, Supervisor
from vllm_handoff.worker.control_link import WORKER_DESCRIPTORS
from vllm_handoff.worker.process import WorkerLaunch

logger = logging.getLogger(__name__)

_MakeCommand = Callable[[int], Command]


class ControlPlane:
    """Starts one worker process a rank and speaks with them.

    Args:
        world_size: number of workers.
        stage_size: workers a stage (TP x PCP); ranks are numbered stage by stage.
        build: makes the worker inside its process, called with `build_kwargs(rank)`.
        context: how to start processes; the default start method if None.
        environment: for each rank, a context that is active while its process starts.
        stall_seconds: rounds in flight without progress for so long end the executor (see stall.py); 0: never.

    Raises from start():
        WorkerStartError: a worker raised or died while starting; its traceback
            is in the message, and no process is left behind.
    """

    def __init__(
        self,
        world_size: int,
        stage_size: int,
        build: Callable[..., Any],
        build_kwargs: Callable[[int], dict[str, Any]],
        context: BaseContext | None = None,
        environment: Callable[[int], contextlib.AbstractContextManager] = lambda rank: contextlib.nullcontext(),
        stall_seconds: float = 0,
    ) -> None:
        # Before anything is made that would have to be removed, which takes descriptors too.
        # A forked worker starts with as many open as there are here, and needs its own besides.
        require_descriptors(DESCRIPTORS + WORKER_DESCRIPTORS + DESCRIPTORS_A_WORKER * world_size, "an engine")
        self.world_size = world_size
        self.stage_size = stage_size
        self.folder = ControlFolder()
        self._build = build
        self._build_kwargs = build_kwargs
        self._environment = environment
        self._stall_seconds = stall_seconds
        self._stall: StallWatch | None = None
        self._stages_board: Board | None = None
        try:
            self._supervisor = Supervisor(context or multiprocessing.get_context(), self.describe_rank)
        except OSError:
            self.folder.remove()
            raise
        self.shared = SharedPayload(self.folder.path)
        self._evidence = Evidence(self.describe_rank)
        self._channel: ControlChannel | None = None
        self._calls: CallTable | None = None
        # One lock around numbering and sending: every worker sees the same stream.
        self._send_lock = threading.Lock()
        self._next_seq = 0
        self._close_lock = threading.RLock()
        self._closed = False
        self._owner_pid = os.getpid()
        self._exit_hook: Finalize | None = None
        self._on_failure: Callable[[], None] | None = None
        self._failure_lock = threading.Lock()
        self.failure: str | None = None

    def describe_rank(self, rank: int) -> str:
        return f"rank {rank} (stage {rank // self.stage_size})"

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [process.pid for process in self._supervisor.processes if process.pid is not None]

    def start(self) -> None:
        """Start all workers and wait until every one is ready."""
        # multiprocessing runs it before it joins its daemons, which would wait for a
        # stuck worker for ever; and it runs at the end of a process that
        # multiprocessing has started itself (as vLLM's engine is), where atexit's hooks do not.
        self._exit_hook = Finalize(None, self.close, exitpriority=10)
        try:
            self._start_processes()
            self._channel = ControlChannel(self.folder, self.world_size)
            self._calls = CallTable(self._channel, self.describe_rank, self._note_failure, self._note_broken)
            self._await_ready()
            if self._stall_seconds:
                self._stall = self._watch_for_stalls()
            self._supervisor.watch(
                self._on_sign,
                has_work=lambda: bool(self._calls),
                is_stuck=self._is_stuck,
                tick=self._stall_seconds / 4 or TICK_S,
            )
        except BaseException:
            self._close(grace=0)
            raise

    def _watch_for_stalls(self) -> StallWatch:
        boards = [BoardReader(worker_board(self.folder.path, rank), WorkerCounts) for rank in range(self.world_size)]
        pids = self.pids
        self._stages_board = Board(Path(self.folder.path) / STAGES_BOARD, StageProgress())
        return StallWatch(
            self._stall_seconds, boards, self.stage_size, lambda rank, own: processor_ns_of_group(pids[rank], own)
        )

    def _is_stuck(self) -> bool:
        """Whether the stages have stood still for too long. On the supervisor's thread."""
        if self._stall is None or self._calls is None:
            return False
        # What has arrived and is not yet fetched is no stage's fault.
        self._calls.receive_arrived()
        why = self._stall.look(time.monotonic_ns(), self._calls.rounds())
        assert self._stages_board is not None
        self._stages_board.write(StageProgress(self._stall.progress_ns))
        if why is not None:
            self._evidence.broken.append(why)
        return why is not None

    def _start_processes(self) -> None:
        for rank in range(self.world_size):
            launch = WorkerLaunch(
                rank, self._build, self._build_kwargs(rank), self.folder.path, self.folder.token, parent_pid=os.getpid()
            )
            self._supervisor.start(launch, self._environment(rank))

    def _await_ready(self) -> None:
        assert self._channel is not None
        channel, awaited = self._channel, set(range(self.world_size))
        poller = zmq.Poller()
        for source in (channel.commands, channel.reports, *self._supervisor.sentinels):
            poller.register(source, zmq.POLLIN)
        settled_at: float | None = None
        while awaited:
            timeout = None if settled_at is None else max(10, int((settled_at - time.monotonic()) * 1000))
            poller.poll(timeout)
            channel.welcome_workers()
            for rank, report, _ in channel.receive():
                if isinstance(report, Ready):
                    awaited.discard(rank)
                elif isinstance(report, Failure):
                    self._evidence.reports.append((rank, report))
            exits = self._supervisor.exits()
            self._evidence.exits.update(exits)
            for rank in exits:
                # Its sentinel stays readable and would make the poll spin.
                with contextlib.suppress(KeyError):
                    poller.unregister(self._supervisor.processes[rank].sentinel)
            if self._evidence and settled_at is None:
                settled_at = time.monotonic() + SETTLE_S
            grace = REPORT_S if self._evidence.awaits_report() else 0
            if settled_at is not None and time.monotonic() >= settled_at + grace:
                raise WorkerStartError(f"The workers could not start: {self._evidence.cause()}")

    def send(
        self,
        make: _MakeCommand,
        payload: bytes,
        label: str,
        reply_rank: int = ALL_RANKS,
        combine: Callable[[dict[int, Any]], Any] = lambda results: results,
        timeout: float | None = None,
        round_number: int | None = None,
    ) -> CallFuture:
        """Send the command `make(seq)` to every worker and return the future of its replies.

        Raises:
            ExecutorFailedError: the executor has failed or is shut down.
        """
        ranks = range(self.world_size) if reply_rank == ALL_RANKS else (reply_rank,)
        with self._send_lock:
            calls = self._require_calls(label)
            seq = self._next_seq
            future = calls.open(seq, label, ranks, combine, timeout, round_number)
            self._transmit(make(seq), payload)
        return future

    def send_unanswered(self, make: _MakeCommand, payload: bytes, label: str) -> None:
        """Send a command that gets no reply of its own."""
        with self._send_lock:
            self._require_calls(label)
            self._transmit(make(self._next_seq), payload)

    def _require_calls(self, label: str) -> CallTable:
        if self.failure is not None:
            raise ExecutorFailedError(f"{label}: the executor has failed: {self.failure}")
        if self._calls is None or self._closed:
            raise ExecutorFailedError(f"{label}: the executor is shut down.")
        return self._calls

    def _transmit(self, command: Command, payload: bytes | None) -> None:
        assert self._channel is not None
        self._next_seq += 1
        try:
            self._channel.send(range(self.world_size), messages.encode(command), payload)
        except zmq.ZMQError:
            # A worker's connection is gone. Its death is being noticed; the
            # stream is broken for good, so the future fails with the cause.
            self._supervisor.poke()

    def call(
        self,
        method: str | Callable[..., Any],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        reply_rank: int = ALL_RANKS,
        combine: Callable[[dict[int, Any]], Any] = lambda results: results,
        timeout: float | None = None,
    ) -> CallFuture:
        """Call a method (or a callable that takes the worker first) on every worker.

        The future's result is `combine` of {rank: result}. It raises
        WorkerCallError if the call raised on any worker, TimeoutError after
        `timeout` seconds.
        """
        kwargs = kwargs or {}
        pickled = not isinstance(method, str)
        name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
        payload = pickling.dumps((method, args, kwargs) if pickled else (args, kwargs))
        return self.send(
            lambda seq: Call(seq, name[:1024], len(payload), pickled, reply_rank),
            payload,
            label=f"call {name!r}",
            reply_rank=reply_rank,
            combine=combine,
            timeout=timeout,
        )

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the executor fails; at once if it has."""
        with self._failure_lock:
            if self.failure is None:
                self._on_failure = callback
                return
        callback()

    def _note_failure(self, rank: int, failure: Failure) -> None:
        self._evidence.reports.append((rank, failure))
        self._supervisor.poke()

    def _note_broken(self, why: str) -> None:
        self._evidence.broken.append(why)
        self._supervisor.poke()

    def _on_sign(self) -> None:
        """Runs on the supervisor's thread at the first sign of a failure."""
        assert self._calls is not None
        # Give the other signs time to arrive, receiving if no caller does.
        self._calls.receive_until(lambda: self._closed, time.monotonic() + SETTLE_S)
        if self._closed:
            return
        self._evidence.exits.update(self._supervisor.exits())
        self._calls.receive_until(
            lambda: self._closed or not self._evidence.awaits_report(), time.monotonic() + REPORT_S
        )
        for rank in self._supervisor.stopped():
            self._evidence.broken.append(
                f"{self.describe_rank(rank)} is stopped by a signal (SIGSTOP) and answers nothing. "
                "Send it SIGCONT sooner, or restart the engine."
            )
        cause = self._evidence.cause() if self._evidence else "a worker's connection is gone."
        with self._failure_lock:
            self.failure = cause
            callback, self._on_failure = self._on_failure, None
        logger.error("The executor has failed: %s", cause)
        if self._evidence.broken:
            # No worker has said anything: let each show what it is doing.
            self._supervisor.show_stacks()
        # Now, because vLLM may kill this process as soon as its front end knows, and
        # workers that have ended by themselves cannot do it. The sockets stay connected.
        remove_folder(self.folder.path)
        self._calls.fail_all(cause)
        # The engine is told before the peers are ended, which takes a moment if they are stuck.
        if callback is not None:
            callback()
        self._supervisor.end(grace=0)

    def close(self, grace: float = 5.0) -> None:
        """End all workers and remove what the control plane made. Can be called again.

        Args:
            grace: seconds that workers get to leave by themselves.
        """
        # A forked child inherits this object (and its exit hook), not the workers.
        if os.getpid() == self._owner_pid:
            self._close(0 if self.failure is not None else grace)

    def _close(self, grace: float) -> None:
        with self._close_lock:
            if self._closed:
                return
            with self._send_lock:
                if self._channel is not None and grace > 0:
                    with contextlib.suppress(zmq.ZMQError, KeyError):
                        self._channel.send(range(self.world_size), messages.encode(Shutdown(self._next_seq)))
                self._closed = True
            self._supervisor.stop_watching()
            self._supervisor.end(grace)
            if self._calls is not None:
                self._calls.fail_all("the executor is shut down.")
                self._calls.close()
            if self._channel is not None:
                self._channel.close()
            self._supervisor.close()
            # The boards' mappings, and with them their descriptors.
            self._stall = None
            self.shared.close()
            self.folder.remove()
            if self._exit_hook is not None:
                self._exit_hook.cancel()
