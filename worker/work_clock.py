"""What a worker's host is doing, and how it spends its time: on commands, or waiting for them or for its peers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_handoff.executor.board import Phase, WorkerCounts

# How this process's device has spent its time, in ns: empty on a CPU, whose host is the device (device_clock.py).
device_ns: dict[str, float] = {}
# Rounds over which a host's time is averaged.
_SMOOTH = 16


class WorkClock:
    """Told by the command loop when commands come and end, and by transfers when they make the host wait.

    The output thread and the one that looks at the device tell it of rounds, hence the lock.

    Args:
        publish: given the counts whenever they have changed.
    """

    def __init__(self, publish: Callable[[WorkerCounts], None] = lambda counts: None) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        now = time.monotonic_ns()
        self.counts = WorkerCounts(since_ns=now, phase_ns=now)
        self._waits_before = 0
        self._decodes = False
        publish(self.counts)

    def begin(self, phase: Phase, number: int | None = None, sent_ns: int = 0) -> None:
        """A command has come; if it is of a round, of that number, and if it begins it, sent at `sent_ns`."""
        now = time.monotonic_ns()
        with self._lock:
            counts = self.counts
            counts.idle_ns += now - counts.since_ns
            if sent_ns > counts.since_ns:
                # Only these measure the way from the engine to here; others have waited in the queue.
                counts.deliveries += 1
                counts.delivery_ns += now - sent_ns
            if number is not None:
                counts.round = number
            self._switch(True, phase, now)

    def end(self, is_round: bool) -> None:
        """The command is served."""
        now = time.monotonic_ns()
        with self._lock:
            counts = self.counts
            counts.rounds += is_round
            waits = counts.hop_wait_ns + counts.handoff_wait_ns
            busy = now - counts.since_ns - (waits - self._waits_before)
            counts.busy_ns += busy
            if self._decodes:
                usual = counts.launch_ns
                # Once in a while a kernel is compiled, or the machine busy with something else.
                counts.launch_ns = usual + (min(busy, 2 * usual) - usual) // _SMOOTH if usual else busy
                self._decodes = False
            self._waits_before = waits
            if device_ns:
                counts.on_device = 1
                counts.device_busy_ns = int(device_ns["busy"])
                counts.device_idle_ns = int(device_ns["idle"])
                counts.device_hop_wait_ns = int(device_ns["hop"])
                counts.device_handoff_wait_ns = int(device_ns["handoff"])
            self._switch(False, Phase.COMMAND, now)

    def _switch(self, working: bool, phase: Phase, now: int) -> None:
        self.counts.working = int(working)
        self.counts.since_ns = now
        self._enter(phase, now)

    def enter(self, phase: Phase) -> None:
        """The command under way goes on to `phase`."""
        now = time.monotonic_ns()
        with self._lock:
            self._enter(phase, now)

    def _enter(self, phase: int, now: int) -> None:
        self.counts.phase = int(phase)
        self.counts.phase_ns = now
        self._publish(self.counts)

    def waiting(self, phase: Phase) -> _Waiting:
        """A context in which the host waits for a peer."""
        return _Waiting(self, phase)

    def waited(self, before: int) -> None:
        """The wait is over, and the host goes on with what it did `before`."""
        now = time.monotonic_ns()
        with self._lock:
            counts = self.counts
            if counts.phase == Phase.HOP:
                counts.hop_wait_ns += now - counts.phase_ns
            elif counts.phase == Phase.HANDOFF:
                counts.handoff_wait_ns += now - counts.phase_ns
            self._enter(before, now)

    def launched(self, number: int, finished: bool = False) -> None:
        """The host has launched all of round `number`; on a CPU, that is `finished` then."""
        with self._lock:
            self.counts.launched = number
            if finished:
                self.counts.device_round = number
            self._publish(self.counts)

    def only_decodes(self) -> None:
        """The command under way launches a round that has nothing but decodes, and waits for nothing meanwhile."""
        self._decodes = True

    def device_finished(self, number: int) -> None:
        """The device has finished round `number`."""
        with self._lock:
            self.counts.device_round = number
            self._publish(self.counts)

    @contextmanager
    def awaiting_output(self, number: int) -> Iterator[None]:
        """While entered, the output of round `number` is waited for."""
        self._output(number)
        try:
            yield
        finally:
            self._output(-1)

    def _output(self, number: int) -> None:
        with self._lock:
            self.counts.output_round = number
            self._publish(self.counts)


class _Waiting:
    # Not a generator: this is entered twice a round, and costs a third of one.
    __slots__ = ("_before", "_clock", "_phase")

    def __init__(self, clock: WorkClock, phase: Phase) -> None:
        self._clock = clock
        self._phase = phase

    def __enter__(self) -> None:
        self._before = self._clock.counts.phase
        self._clock.enter(self._phase)

    def __exit__(self, *_: object) -> None:
        self._clock.waited(self._before)


_here = WorkClock()


def here() -> WorkClock:
    """This process's clock. Until a worker has installed its own, one that nobody reads."""
    return _here


def install(clock: WorkClock) -> WorkClock:
    """Make `clock` this process's own."""
    global _here
    _here = clock
    return clock
