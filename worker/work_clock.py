"""How a worker's host spends its time: on commands, or waiting for them, for hidden states or for sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_handoff.executor.board import WorkerCounts

# Time that this process's host has waited for arrivals, in ns, by kind of link.
waited_ns = {"hop": 0, "handoff": 0}
# The same of its device, with what it works and idles: empty on a CPU, whose host is the device (device_clock.py).
device_ns: dict[str, float] = {}


class WorkClock:
    """Told by the command loop when commands come and end. Costs two clock reads a command.

    Args:
        publish: given the counts whenever they have changed.
    """

    def __init__(self, publish: Callable[[WorkerCounts], None] = lambda counts: None) -> None:
        self._publish = publish
        self.counts = WorkerCounts(since_ns=time.monotonic_ns())
        self._waits_before = 0
        publish(self.counts)

    def begin(self, sent_ns: int = 0) -> None:
        """A command has come; if it is a round, sent at `sent_ns`."""
        counts, now = self.counts, time.monotonic_ns()
        counts.idle_ns += now - counts.since_ns
        if sent_ns > counts.since_ns:
            # Only these measure the way from the engine to here; others have waited in the queue.
            counts.deliveries += 1
            counts.delivery_ns += now - sent_ns
        self._switch(working=1, now=now)

    def end(self, is_round: bool) -> None:
        """The command is served."""
        counts, now = self.counts, time.monotonic_ns()
        counts.rounds += is_round
        counts.hop_wait_ns = waited_ns["hop"]
        counts.handoff_wait_ns = waited_ns["handoff"]
        waits = counts.hop_wait_ns + counts.handoff_wait_ns
        counts.busy_ns += now - counts.since_ns - (waits - self._waits_before)
        self._waits_before = waits
        if device_ns:
            counts.on_device = 1
            counts.device_busy_ns = int(device_ns["busy"])
            counts.device_idle_ns = int(device_ns["idle"])
            counts.device_hop_wait_ns = int(device_ns["hop"])
            counts.device_handoff_wait_ns = int(device_ns["handoff"])
        self._switch(working=0, now=now)

    def _switch(self, working: int, now: int) -> None:
        self.counts.working = working
        self.counts.since_ns = now
        self._publish(self.counts)
