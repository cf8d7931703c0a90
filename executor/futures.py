"""The futures of calls to the workers, and what each still awaits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_handoff.executor.calls import CallTable

Combine = Callable[[dict[int, Any]], Any]


class CallFuture(Future):
    """A future that receives replies while its result is awaited.

    Works from any thread and in any order. A callback starts a thread that
    receives in the background; concurrent.futures.wait() does not, and needs one.
    """

    def __init__(self, calls: CallTable) -> None:
        super().__init__()
        self._calls = calls
        self.call: PendingCall | None = None

    def result(self, timeout: float | None = None) -> Any:
        """The reply; raises TimeoutError after `timeout` seconds, or what the call failed with."""
        self._calls.wait(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._calls.wait(self, timeout)
        return super().exception(0)

    def done(self) -> bool:
        """Whether the reply is here; takes what has arrived, without waiting."""
        if not self.is_complete():
            self._calls.receive_arrived()
        return self.is_complete()

    def is_complete(self) -> bool:
        """Whether the reply has been taken off the socket."""
        return super().done()

    def add_done_callback(self, fn: Callable[[Future], object]) -> None:
        super().add_done_callback(fn)
        if not self.is_complete():
            self._calls.receive_in_background()


class PendingCall:
    """One command that awaits replies of `waiting` ranks."""

    __slots__ = ("combine", "deadline", "future", "label", "results", "round", "seq", "timeout", "waiting")

    def __init__(
        self,
        seq: int,
        label: str,
        ranks: Iterable[int],
        combine: Combine,
        future: CallFuture,
        timeout: float | None,
        round_number: int | None,
    ) -> None:
        self.seq = seq
        self.label = label
        self.waiting = set(ranks)
        self.results: dict[int, Any] = {}
        self.combine = combine
        self.future = future
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        # None for a call of a method.
        self.round = round_number


def complete(future: CallFuture, result: Any = None, error: BaseException | None = None) -> None:
    """Complete a future unless it already is (a reply may cross with a failure or a timeout)."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
    # The call refers to the future: left in place, each round would be a cycle for the garbage collector.
    future.call = None
