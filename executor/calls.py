"""Calls in flight: receives replies and completes the futures that await them.

There is no receiving thread on the fast path. The thread that waits for a
result takes the receiving role itself, so a reply costs one wake-up and no
hand-over between threads; further waiting threads follow until the role is
free. Replies are matched by the command's number, so they complete whichever
future they belong to, in any order.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from vllm_handoff.executor.channel import ControlChannel
from vllm_handoff.executor.errors import ExecutorFailedError, ProtocolError, WorkerCallError
from vllm_handoff.executor.futures import CallFuture, Combine, PendingCall, complete
from vllm_handoff.executor.messages import Failure, Frame, Reply, Report


class CallTable:
    """The calls in flight of one executor.

    Args:
        channel: where reports are received.
        describe_rank: a rank's name for messages, such as "rank 1 (stage 1)".
        on_fatal: told of a worker's fatal Failure; must not block.
        on_broken: told, in one sentence, why the executor cannot go on (a round
            that got no reply in time, a malformed report).
    """

    def __init__(
        self,
        channel: ControlChannel,
        describe_rank: Callable[[int], str],
        on_fatal: Callable[[int, Failure], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._describe_rank = describe_rank
        self._on_fatal = on_fatal
        self._on_broken = on_broken
        self._pending: dict[int, PendingCall] = {}
        # Calls that have failed or timed out, with the ranks whose replies are still to come.
        self._given_up: dict[int, set[int]] = {}
        self._failed: str | None = None
        # Guards the pending table, the receiving role and the followers' wait.
        self._changed = threading.Condition()
        self._receiving = False
        self._followers = 0
        self._background: threading.Thread | None = None
        self._closed = False
        # Wakes the receiving thread when a call completes without a message.
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(channel.reports, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def __len__(self) -> int:
        return len(self._pending)

    def open(
        self,
        seq: int,
        label: str,
        ranks: Iterable[int],
        combine: Combine,
        timeout: float | None = None,
        round_number: int | None = None,
    ) -> CallFuture:
        """Register a call before it is sent, and return its future.

        Raises:
            ExecutorFailedError: the executor has failed.
        """
        future = CallFuture(self)
        call = PendingCall(seq, label, ranks, combine, future, timeout, round_number)
        future.call = call
        with self._changed:
            if self._failed is not None:
                raise ExecutorFailedError(self._failed)
            self._pending[seq] = call
        return future

    def rounds(self) -> list[int]:
        """The numbers of the rounds in flight, oldest first; none while a call, which may take long, is in flight."""
        with self._changed:
            calls = list(self._pending.values())
        if any(call.round is None for call in calls):
            return []
        return [call.round for call in calls if call.round is not None]

    def fail_all(self, error: str) -> None:
        """Fail every call in flight, and every later one, with `error`."""
        with self._changed:
            if self._failed is None:
                self._failed = error
            failed, self._pending = list(self._pending.values()), {}
        for call in failed:
            complete(call.future, error=ExecutorFailedError(f"{call.label}: {error}"))
        self._wake()

    def fail_one(self, seq: int, error: BaseException) -> None:
        """Fail the call `seq`, if it is still in flight."""
        with self._changed:
            # In one step: a reply that crosses with it has to find the call in one place or the other.
            call = self._pending.pop(seq, None)
            if call is not None and call.waiting:
                self._given_up[seq] = call.waiting
        if call is not None:
            complete(call.future, error=error)

    def wait(self, future: CallFuture, timeout: float | None) -> None:
        """Receive until `future` is complete.

        Raises:
            TimeoutError: it is not after `timeout` seconds.
        """
        call = future.call
        if call is None or future.is_complete():
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        expires = call.deadline is not None and (deadline is None or call.deadline <= deadline)
        if self.receive_until(future.is_complete, call.deadline if expires else deadline):
            return
        missing = ", ".join(self._describe_rank(rank) for rank in sorted(call.waiting))
        if not expires:
            raise TimeoutError(f"{call.label}: no reply from {missing} within {timeout:g} s.")
        message = f"{call.label}: no reply from {missing} within {call.timeout:g} s."
        if call.round is not None:
            # A round that never ends cannot be dropped: the stream behind it is stuck as well.
            self._on_broken(message)
            self.receive_until(future.is_complete, time.monotonic() + 1)
        self.fail_one(call.seq, TimeoutError(message))

    def receive_until(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Receive, or let the thread that holds the role receive, until done() or the deadline."""
        with self._changed:
            while self._receiving:
                if done():
                    return True
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._followers += 1
                self._changed.wait(remaining)
                self._followers -= 1
            if done() or self._closed:
                return done()
            self._receiving = True
        try:
            while not done():
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                self._receive(remaining)
            return True
        finally:
            with self._changed:
                self._receiving = False
                self._changed.notify_all()

    def receive_arrived(self) -> None:
        """Take the reports that have arrived, unless another thread is at it."""
        with self._changed:
            if self._receiving or self._closed:
                return
            self._receiving = True
        try:
            self._dispatch_arrived()
        finally:
            with self._changed:
                self._receiving = False
                self._changed.notify_all()

    def receive_in_background(self) -> None:
        """Start a thread that receives whenever nobody else does."""
        with self._changed:
            if self._background is not None or self._closed:
                return
            self._background = threading.Thread(
                target=self.receive_until, args=(lambda: self._closed,), name="handoff-receive", daemon=True
            )
        self._background.start()

    def close(self) -> None:
        """Stop receiving. Call before the channel is closed: waits until the receiving role is free."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: not self._receiving, timeout=5)
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join(timeout=5)
        with self._changed:
            # A late wake-up must not write to whatever has this number next.
            fd, self._wake_fd = self._wake_fd, -1
        os.close(fd)

    def _receive(self, timeout: float | None) -> None:
        """Block until something arrives, then dispatch all of it. Only in the receiving role."""
        events = self._poller.poll(None if timeout is None else max(1, int(timeout * 1000 + 0.5)))
        if any(source == self._wake_fd for source, _ in events):
            os.eventfd_read(self._wake_fd)
        self._dispatch_arrived()
        if self._followers:
            with self._changed:
                self._changed.notify_all()

    def _dispatch_arrived(self) -> None:
        try:
            arrived = self._channel.receive()
        except ProtocolError as error:
            self._on_broken(f"{error} The control plane is out of step; restart the engine.")
            return
        for rank, report, payload in arrived:
            self._dispatch(rank, report, payload)

    def _dispatch(self, rank: int, report: Report, payload: Frame | None) -> None:
        if isinstance(report, Reply):
            self._dispatch_reply(rank, report.seq, payload)
        elif isinstance(report, Failure):
            if report.fatal:
                self._on_fatal(rank, report)
            else:
                # A rank may fail in a call that another one was to answer.
                self._is_due(rank, report.seq)
                text = f"{report.where} failed on {self._describe_rank(rank)}: {report.error}\n{report.traceback}"
                self.fail_one(report.seq, WorkerCallError(text))

    def _dispatch_reply(self, rank: int, seq: int, payload: Frame | None) -> None:
        if not self._is_due(rank, seq):
            self._note_surplus(rank, seq)
            return
        call = self._pending.get(seq)
        if call is None:
            return
        assert payload is not None
        try:
            call.results[rank] = pickle.loads(payload)
            if call.waiting or self._pop(seq) is None:
                return
            complete(call.future, call.combine(call.results))
        except Exception as error:
            self.fail_one(seq, error)
            complete(call.future, error=error)

    def _is_due(self, rank: int, seq: int) -> bool:
        """Note that `rank` has answered the command `seq`; False if it owed no answer."""
        with self._changed:
            call = self._pending.get(seq)
            waiting = call.waiting if call is not None else self._given_up.get(seq, set())
            if rank not in waiting:
                return False
            waiting.discard(rank)
            if call is None and not waiting:
                del self._given_up[seq]
            return True

    def _note_surplus(self, rank: int, seq: int) -> None:
        """An answer came twice, or unasked: the stream is not what it seems, and dropping it would hide that."""
        if self._failed is None:
            self._on_broken(
                f"{self._describe_rank(rank)} answered command {seq}, which it has answered before or was not to "
                "answer. The control plane is out of step; restart the engine."
            )

    def _pop(self, seq: int) -> PendingCall | None:
        with self._changed:
            return self._pending.pop(seq, None)

    def _wake(self) -> None:
        with self._changed:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
            self._changed.notify_all()
