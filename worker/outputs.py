"""Outputs on their way to the host, and who finishes them.

Whoever waits for an output needs the interpreter's lock the moment it is
there, several times for one output, and then the main thread, which launches
rounds, waits for it. (On an H200 under load everything that gives the lock up
took the last stage's host a third longer, and a round a quarter.) So while the
main thread has rounds to launch it finishes outputs itself, between two of its
steps. When it has nothing to do, or something long, a thread of their own
waits for them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class OutputThread:
    """Finishes outputs, in the order in which they were handed over.

    Args:
        finish: called with each item; reports the result or the error.
        prepare: called once on the thread before anything else. A thread does
            not inherit the current device, and the first device call on it would
            otherwise make a context on device 0.
    """

    def __init__(self, finish: Callable[[Any], None], prepare: Callable[[], None]) -> None:
        self._finish = finish
        self._prepare = prepare
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        # Each written by one thread alone.
        self._put = 0
        self._finished = 0
        self._thread = threading.Thread(target=self._run, name="handoff-output", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether anything that was handed over is not finished."""
        return self._put != self._finished

    def put(self, item: Any) -> None:
        self._put += 1
        self._queue.put(item)

    def close(self) -> bool:
        """Finish what was handed over and end the thread; False if it is stuck."""
        self._queue.put(None)
        self._thread.join(timeout=2)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._prepare()
        while (item := self._queue.get()) is not None:
            self._finish(item)
            self._finished += 1


class Outputs:
    """The outputs of one worker. All methods belong to the main thread.

    Args:
        finish: called with each item, (command, output), on the main thread.
        new_thread: makes the thread, when it is first needed.
    """

    def __init__(self, finish: Callable[[Any], None], new_thread: Callable[[], OutputThread]) -> None:
        self._finish = finish
        self._new_thread = new_thread
        self._thread: OutputThread | None = None
        self._here: deque[tuple[Any, Any]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether there are any for the main thread to finish."""
        return bool(self._here)

    def put(self, command: Any, output: Any) -> None:
        """An output that has yet to reach the host. Outputs are finished in the order in which they are put."""
        self._here.append((command, output))
        if has_arrived(output) is None or (self._thread is not None and self._thread.busy):
            self.hand_over()

    def look(self) -> None:
        """Finish those that have reached the host. Waits for nothing."""
        while self._here and has_arrived(self._here[0][1]):
            self._finish(self._here.popleft())

    def hand_over(self) -> None:
        """Leave what there is to the thread: the main thread is about to do something long, or nothing."""
        if self._here and self._thread is None:
            self._thread = self._new_thread()
        while self._here:
            assert self._thread is not None
            self._thread.put(self._here.popleft())

    def close(self) -> bool:
        """Finish all; False if one never comes."""
        self.hand_over()
        return self._thread is None or self._thread.close()


def has_arrived(output: Any) -> bool | None:
    """Whether an output of vLLM's, or one of ours, has reached the host. None if it cannot be asked."""
    own = getattr(output, "has_arrived", None)
    if own is not None:
        return own()
    event = getattr(output, "copy_event", None)
    return None if event is None else has_passed(event)


def has_passed(event: Any) -> bool:
    """Whether the device has passed an event. On a CPU, where vLLM has a stand-in for events, it has."""
    query = getattr(event, "query", None)
    return True if query is None else query()
