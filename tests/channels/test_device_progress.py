"""How far a device is, learned from events: without waiting for it, and without a thread that wakes up for nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from vllm_handoff.executor.board import WorkerCounts
from vllm_handoff.worker import device_progress, work_clock
from vllm_handoff.worker.device_progress import DeviceProgress
from vllm_handoff.worker.work_clock import WorkClock


class Event:
    """Done when the test says so."""

    made: list[Event] = []
    asked = 0

    def __init__(self) -> None:
        self.done = False
        self.recorded = 0
        Event.made.append(self)

    def record(self, stream: object) -> None:
        self.recorded += 1
        self.done = False

    def query(self) -> bool:
        Event.asked += 1
        return self.done

    def synchronize(self) -> None:
        raise AssertionError("nobody may wait for the device")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerCounts]:
    Event.made, Event.asked = [], 0
    monkeypatch.setattr(DeviceProgress, "_new_event", lambda self: Event())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(device_progress, "current_stream", lambda device: None)
    monkeypatch.setattr(device_progress, "_LOOK_EVERY_S", 0.02)
    before = work_clock.here()
    yield work_clock.install(WorkClock()).counts
    for event in Event.made:
        event.done = True
    work_clock.install(before)


def within(seconds: float, condition: object) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_on_a_cpu_what_is_launched_is_done(counts: WorkerCounts) -> None:
    progress = DeviceProgress(torch.device("cpu"))
    progress.launched(4)
    assert (counts.launched, counts.device_round) == (4, 4)
    assert not Event.made


def test_a_device_that_stops_in_the_middle(counts: WorkerCounts) -> None:
    progress = DeviceProgress(torch.device("cuda"))
    for number in (4, 5, 7):
        progress.launched(number)
    assert (counts.launched, counts.device_round) == (7, -1)
    Event.made[0].done = Event.made[2].done = True
    # While the main thread launches nothing more. The order is the stream's: the last is not done before the second.
    assert within(10, lambda: counts.device_round == 4)
    time.sleep(0.1)
    assert counts.device_round == 4
    Event.made[1].done = True
    assert within(10, lambda: counts.device_round == 7)


def test_an_idle_device_is_not_asked(counts: WorkerCounts) -> None:
    progress = DeviceProgress(torch.device("cuda"))
    progress.launched(1)
    Event.made[0].done = True
    assert within(10, lambda: counts.device_round == 1)
    time.sleep(0.1)
    asked = Event.asked
    time.sleep(0.3)
    assert Event.asked == asked
    # And it is asked again once there is something to ask for, with the same event.
    progress.launched(2)
    assert len(Event.made) == 1 and Event.made[0].recorded == 2
    Event.made[0].done = True
    assert within(10, lambda: counts.device_round == 2)
