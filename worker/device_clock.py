"""How a GPU spends its time, for metrics: on rounds, or waiting for hidden states, for sampled tokens or for a round.

Events on the device's stream mark where a round's waits begin and end. They
are read once the device has passed them (device_progress.py knows when), so
nobody ever waits for the device. A CPU has no stream: there the host's own
times are the stage's (work_clock.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_handoff.worker import work_clock
from vllm_handoff.worker.recorder import Mark
from vllm_handoff.worker.streams import current_stream

# What the time that ends at a mark was spent on. FORWARD is left out: both sides of it are work.
_BEFORE = {
    Mark.BEGIN: "idle",
    Mark.HANDOFF: "handoff",
    Mark.HOP_WAIT: "busy",
    Mark.HOP: "hop",
    Mark.END: "busy",
}

Marks = list[tuple[Mark, Any]]


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """Adds up one rank's device times in `work_clock.device_ns`. Launch gaps within a round count as work.

    Args:
        device: whose current stream the rounds are launched on.
        new_event: makes an event with record(stream), query() and elapsed_time(later).
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Any] = _timing_event) -> None:
        self._device = device
        self._new_event = new_event
        # Events that were read are used again: making one costs more than recording it.
        self._free: list[Any] = []
        self._round: Marks | None = None
        self._last = self._record()
        for kind in ("busy", "idle", "hop", "handoff"):
            work_clock.device_ns.setdefault(kind, 0.0)

    def begin(self) -> None:
        """A round starts here."""
        self._round = []
        self.mark(Mark.BEGIN)

    def mark(self, mark: Mark) -> None:
        """The stream passes `mark` once it has done what was launched so far."""
        # Warm-up passes marks outside of rounds.
        if self._round is not None and mark in _BEFORE:
            self._round.append((mark, self._record()))

    def end(self) -> Marks | None:
        """The host has launched the round. Its marks, to be accounted once the device has passed the last."""
        if self._round is None:
            return None
        self.mark(Mark.END)
        marks, self._round = self._round, None
        return marks

    def account(self, marks: Marks) -> None:
        """Add up a round that the device has passed. Rounds come in order, each once."""
        for mark, event in marks:
            # elapsed_time is in ms, a float of 32 bits: between neighbours, never since the start.
            work_clock.device_ns[_BEFORE[mark]] += self._last.elapsed_time(event) * 1e6
            self._free.append(self._last)
            self._last = event

    def _record(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record(current_stream(self._device))
        return event
