"""When each round ran on this rank."""

from __future__ import annotations

import time

import numpy as np

_FIELDS = 3


class Timeline:
    """The last rounds of this rank: their numbers and host times. Recording costs two clock reads a round.

    Kept in one block of memory: an object a round would be half an hour of
    growth that looks like a leak, and work for the garbage collector.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._table = np.zeros(_FIELDS * capacity, np.int64).data
        self._count = 0
        self._open: tuple[int, int] | None = None

    def begin(self, number: int) -> None:
        """Round `number` starts here."""
        self._open = number, time.monotonic_ns()

    def end(self) -> None:
        """The round that started last is over."""
        if self._open is not None:
            at = _FIELDS * (self._count % self._capacity)
            self._table[at], self._table[at + 1] = self._open
            self._table[at + 2] = time.monotonic_ns()
            self._count += 1
            self._open = None

    def rounds(self) -> list[tuple[int, int, int]]:
        """(round, begin_ns, end_ns), oldest first, by the machine's monotonic clock, which its processes share."""
        table = np.asarray(self._table).reshape(-1, _FIELDS)
        oldest = self._count % self._capacity
        rows = np.roll(table, -oldest, axis=0) if self._count > self._capacity else table[: self._count]
        return [(number, begin, end) for number, begin, end in rows.tolist()]
