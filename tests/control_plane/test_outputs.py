"""Who finishes an output, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.worker.outputs import Outputs, OutputThread, has_arrived


class Event:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def query(self) -> bool:
        return self.passed.is_set()


class Output:
    """Like vLLM's: `copy_event` says whether it has reached the host."""

    def __init__(self) -> None:
        self.copy_event = Event()

    def arrive(self) -> None:
        self.copy_event.passed.set()


class Finished:
    """What was finished, by whom."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.by: list[bool] = []
        self.outputs = Outputs(self._finish, lambda: OutputThread(self._finish, lambda: None))

    def _finish(self, item: tuple[int, Output]) -> None:
        number, output = item
        assert output.copy_event.passed.wait(30), "the test lets every output arrive"
        self.order.append(number)
        self.by.append(threading.current_thread() is threading.main_thread())

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.order) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def finished() -> Iterator[Finished]:
    made = Finished()
    yield made
    assert made.outputs.close()


def test_the_main_thread_finishes_what_has_arrived(finished: Finished) -> None:
    first, second = Output(), Output()
    finished.outputs.put(0, first)
    finished.outputs.put(1, second)
    second.arrive()
    finished.outputs.look()
    assert finished.order == []
    first.arrive()
    finished.outputs.look()
    assert (finished.order, finished.by) == ([0, 1], [True, True])


def test_what_is_handed_over_is_waited_for_and_what_follows_keeps_its_place(finished: Finished) -> None:
    slow, quick, late = Output(), Output(), Output()
    finished.outputs.put(0, slow)
    finished.outputs.hand_over()
    quick.arrive()
    finished.outputs.put(1, quick)
    finished.outputs.look()
    assert finished.order == []
    slow.arrive()
    finished.wait(2)
    assert (finished.order, finished.by) == ([0, 1], [False, False])
    # The thread's last act is to say that it is free.
    deadline = time.monotonic() + 30
    while finished.outputs._thread.busy and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.001)
    late.arrive()
    finished.outputs.put(2, late)
    finished.outputs.look()
    assert finished.by == [False, False, True]


def test_what_cannot_be_asked_goes_to_the_thread(finished: Finished) -> None:
    class Unknown:
        pass

    class Untold(Output):
        def __init__(self) -> None:
            super().__init__()
            self.arrive()
            self.has_arrived = lambda: None

    assert has_arrived(Unknown()) is None
    finished.outputs.put(0, Untold())
    finished.wait(1)
    assert finished.by == [False]


def test_closing_finishes_what_there_is() -> None:
    finished = Finished()
    output = Output()
    finished.outputs.put(0, output)
    output.arrive()
    assert finished.outputs.close()
    assert finished.order == [0]


@given(st.lists(st.sampled_from(["put", "arrive", "look", "hand over", "yield"]), max_size=60))
def test_any_order_of_events_keeps_the_order_of_outputs(events: list[str]) -> None:
    finished, outputs, arrived = Finished(), [], 0
    for event in events:
        if event == "put":
            outputs.append(Output())
            finished.outputs.put(len(outputs) - 1, outputs[-1])
        elif event == "arrive" and arrived < len(outputs):
            outputs[arrived].arrive()
            arrived += 1
        elif event == "look":
            finished.outputs.look()
        elif event == "hand over":
            finished.outputs.hand_over()
        else:
            time.sleep(0)
    for output in outputs:
        output.arrive()
    assert finished.outputs.close()
    assert finished.order == list(range(len(outputs)))
