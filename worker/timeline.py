"""When each round ran on this rank."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple


class RoundTime(NamedTuple):
    """Host times of one round, in nanoseconds of the machine's monotonic clock, comparable between its processes."""

    round: int
    begin_ns: int
    end_ns: int


class Timeline:
    """The last rounds of this rank. Recording costs two clock reads a round."""

    def __init__(self, capacity: int = 65536) -> None:
        self._rounds: deque[RoundTime] = deque(maxlen=capacity)
        self._open: tuple[int, int] | None = None

    def begin(self, number: int) -> None:
        """Round `number` starts here."""
        self._open = number, time.monotonic_ns()

    def end(self) -> None:
        """The round that started last is over."""
        if self._open is not None:
            number, begin = self._open
            self._rounds.append(RoundTime(number, begin, time.monotonic_ns()))
            self._open = None

    def rounds(self) -> list[tuple[int, int, int]]:
        """(round, begin_ns, end_ns), oldest first."""
        return [(entry.round, entry.begin_ns, entry.end_ns) for entry in self._rounds]
