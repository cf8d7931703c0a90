"""Which rounds the device has finished, learned without waiting for it.

A host launches rounds and goes on: when a kernel or a collective never ends,
hosts look idle and only the device stands still. An event behind each round,
looked at now and then, tells the two apart.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from vllm_handoff.worker import work_clock
from vllm_handoff.worker.device_clock import DeviceClock, Marks
from vllm_handoff.worker.streams import current_stream

_LOOK_EVERY_S = 1.0


class DeviceProgress:
    """Tells this process's work clock of rounds that were launched, and of those that the device has finished.

    Args:
        device: on a CPU, what was launched is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._lock = threading.Lock()
        # The round, the event behind it, and its marks if its times are counted.
        self._under_way: deque[tuple[int, Any, Marks | None]] = deque()
        self._spare: list[Any] = []
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None
        self.clock: DeviceClock | None = None

    def launched(self, number: int, marks: Marks | None = None) -> None:
        """The host has launched round `number` on the current stream.

        Args:
            marks: what `clock` has put into the stream, the last of it behind the round.
        """
        work_clock.here().launched(number, finished=not self._cuda)
        if not self._cuda:
            return
        with self._lock:
            self._under_way.append((number, marks[-1][1] if marks else self._record(), marks))
        self.look()
        if self._thread is None:
            # Only now: while graphs are captured at start, no other thread may ask the device anything.
            self._thread = threading.Thread(target=self._watch, name="handoff-device-progress", daemon=True)
            self._thread.start()
        self._busy.set()

    def look(self) -> bool:
        """Take note of what is finished; whether anything is still under way. Never waits for the device."""
        finished = None
        with self._lock:
            while self._under_way and self._under_way[0][1].query():
                finished, event, marks = self._under_way.popleft()
                if marks is None:
                    self._spare.append(event)
                else:
                    assert self.clock is not None, "marks without a clock"
                    self.clock.account(marks)
            left = bool(self._under_way)
            if finished is not None:
                work_clock.here().device_finished(finished)
        return left

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(current_stream(self._device))
        return event

    def _new_event(self) -> Any:
        return torch.cuda.Event()

    def _watch(self) -> None:
        # The main thread looks when it launches; when it has nothing to launch, or is stuck, this one does.
        torch.cuda.set_device(self._device)
        while self._busy.wait():
            self._busy.clear()
            while self.look():
                # One look a second while the device works; none while it is idle.
                time.sleep(_LOOK_EVERY_S)
