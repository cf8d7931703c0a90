"""Records what this rank's device did in each round, from events on its stream.

Off, it costs two comparisons a mark. On, a round records six events: no
transfer, no wait. Times are read out when the recording stops. Marks also
reach the clock behind the metrics, where there is one (device_clock.py).
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm_handoff.worker.device_clock import DeviceClock, Marks


class Mark(IntEnum):
    """Moments of a round on the device's stream, in order."""

    BEGIN = 0  # the stream reaches the round
    HANDOFF = 1  # the handoffs that the round needs have arrived and are applied
    HOP_WAIT = 2  # inputs are built; the stream reaches the hop's receive
    HOP = 3  # hidden states have arrived
    FORWARD = 4  # the forward is done, its hop handed over
    END = 5  # sampled (last stage) or told (others)


class RecordedWork(NamedTuple):
    """What a round had to compute beside its number of tokens."""

    decodes: int = 0  # requests with one token, which attend to `context` tokens in all
    context: int = 0
    prompt_context: int = 0  # tokens that the others' tokens attend to, summed over these tokens


class RecordedRound(NamedTuple):
    """One round of one rank. Times in seconds of the machine's monotonic clock, by Mark; None for marks it lacks."""

    round: int
    num_tokens: int
    rows: int  # of its handoff, 0 without one
    marks: list[float | None]
    host: tuple[float, float]  # the host began and ended launching the round
    work: RecordedWork


def work_of(scheduler_output: Any) -> RecordedWork:
    """The work in a SchedulerOutput."""
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    decodes = context = prompt_context = 0
    for req_id, count in scheduled.items():
        if count == 1:
            decodes += 1
            context += before[req_id] + 1
        else:
            prompt_context += count * (before[req_id] + count // 2)
    return RecordedWork(decodes, context, prompt_context)


class _HostEvent:
    """A CPU has no stream: what was launched is done."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.monotonic()


class Recorder:
    """The recording of one rank.

    Args:
        device: the rank's device; on a CPU, marks are host times.
        capacity: rounds kept; recording stops by itself when it is full.
    """

    def __init__(self, device: torch.device, capacity: int = 20000) -> None:
        self._device = device
        self._capacity = capacity
        self._rounds: list[tuple[int, int, int, list[Any], list[float], RecordedWork]] = []
        self._base: tuple[Any, float] | None = None
        self.on = False
        self.clock: DeviceClock | None = None

    def start(self) -> None:
        """Forget what was recorded, and record from the next round on."""
        self._rounds = []
        base = self._event()
        self._settle()
        base.record()
        # The device is idle, so the event is done when the clock is read.
        self._base = (base, time.monotonic())
        self._settle()
        self.on = True

    def begin(self, number: int, num_tokens: int, rows: int, scheduler_output: Any = None) -> None:
        """A round starts here; of its SchedulerOutput the work is noted, if one is given."""
        if self.clock is not None:
            self.clock.begin()
        if not self.on:
            return
        if len(self._rounds) >= self._capacity:
            self.on = False
            return
        begin = time.monotonic()
        work = RecordedWork() if scheduler_output is None else work_of(scheduler_output)
        self._rounds.append((number, num_tokens, rows, [None] * len(Mark), [begin, 0.0], work))
        self._record(Mark.BEGIN)

    def mark(self, mark: Mark) -> None:
        """The stream passes `mark` once it has done what was launched so far."""
        if self.clock is not None:
            self.clock.mark(mark)
        self._record(mark)

    def end(self) -> Marks | None:
        """The host has launched the round. What the clock has marked in it, if there is one."""
        marks = self.clock.end() if self.clock is not None else None
        if self.on and self._rounds:
            self._record(Mark.END)
            self._rounds[-1][4][1] = time.monotonic()
        return marks

    def stop(self) -> list[RecordedRound]:
        """Stop recording and read the times. Waits for the device."""
        self.on = False
        if self._base is None:
            return []
        self._settle()
        base, zero = self._base
        found = []
        for number, num_tokens, rows, events, host, work in self._rounds:
            marks = [None if event is None else self._seconds(base, zero, event) for event in events]
            found.append(RecordedRound(number, num_tokens, rows, marks, (host[0], host[1]), work))
        self._rounds = []
        return found

    def _record(self, mark: Mark) -> None:
        if self.on and self._rounds:
            event = self._event()
            event.record()
            self._rounds[-1][3][mark] = event

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self._device.type == "cuda" else _HostEvent()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @staticmethod
    def _seconds(base: Any, zero: float, event: Any) -> float:
        return event.at if isinstance(event, _HostEvent) else zero + base.elapsed_time(event) / 1000
