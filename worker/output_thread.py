"""The thread that waits for a round's outputs to reach the host, so that the main thread need not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class OutputThread:
    """Finishes outputs, in the order in which they were handed over.

    Args:
        finish: called with each (seq, output); reports the result or the error.
        prepare: called once on the thread before anything else. A thread does
            not inherit the current device, and the first device call on it would
            otherwise make a context on device 0.
    """

    def __init__(self, finish: Callable[[Any], None], prepare: Callable[[], None]) -> None:
        self._finish = finish
        self._prepare = prepare
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="handoff-output", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
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
