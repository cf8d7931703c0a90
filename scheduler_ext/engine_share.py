"""Whether the engine's own thread, which schedules and collects, is what everybody waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

# Above this share of a core there is nothing left to wait in.
SETS_THE_PACE = 0.9


class EngineShare:
    """The calling thread's share of a core. Make it on the thread whose share is meant, and ask there.

    Args:
        now, used: clocks, in seconds: a monotonic one, and the thread's processor time.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.thread_time) -> None:
        self._now = now
        self._used = used
        self._before = now(), used()

    def since_last_asked(self) -> float:
        """0 to 1."""
        now, used = self._now(), self._used()
        then, used_then = self._before
        self._before = now, used
        return (used - used_then) / (now - then) if now > then else 0.0
