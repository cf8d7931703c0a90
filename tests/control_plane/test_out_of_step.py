"""Control messages that are doubled, swapped, cut or too large end the executor with an error that says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from fake_worker import SchedulerOutput, is_running, rounds, wait_for
from vllm_handoff.executor import messages
from vllm_handoff.executor.errors import ExecutorFailedError
from vllm_handoff.executor.messages import Reply
from vllm_handoff.worker.control_link import ReportSocket

pytestmark = pytest.mark.timeout(120)

Send = Callable[..., None]


def doubled(send: Send) -> Send:
    def twice(*args: Any) -> None:
        send(*args)
        send(*args)

    return twice


def swapped(send: Send) -> Send:
    held: list[tuple] = []

    def later(*args: Any) -> None:
        held.append(args)
        if len(held) == 2:
            send(*held.pop())
            send(*held.pop())

    return later


def cut(send: Send) -> Send:
    def short(ranks: Iterable[int], header: bytes, payload: bytes | None = None) -> None:
        send(ranks, header, payload and payload[:-1])

    return short


def lost(send: Send) -> Send:
    dropped: list[tuple] = []

    def after_the_first(*args: Any) -> None:
        if dropped:
            send(*args)
        else:
            dropped.append(args)

    return after_the_first


def corrupt(send: Send) -> Send:
    def flipped(ranks: Iterable[int], header: bytes, payload: bytes | None = None) -> None:
        send(ranks, bytes([header[0] ^ 0x40]) + header[1:], payload)

    return flipped


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (doubled, "command 1 arrived where command 2 was due"),
        (swapped, "command 2 arrived where command 1 was due"),
        (lost, "command 2 arrived where command 1 was due"),
        (cut, "payload bytes, got"),
        (corrupt, "A command's header of"),
    ],
)
def test_a_command_that_is_not_as_it_was_sent(change: Callable[[Send], Send], words: str) -> None:
    called = threading.Event()
    with rounds() as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        pids = plane.pids
        dispatcher.execute_model(SchedulerOutput(note=0))
        assert dispatcher.sample_tokens(None).result()["note"] == 0
        assert plane._channel is not None
        plane._channel.send = change(plane._channel.send)  # type: ignore[method-assign]
        futures = []
        for number in (1, 2):
            try:
                dispatcher.execute_model(SchedulerOutput(note=number))
                futures.append(dispatcher.sample_tokens(None))
            except ExecutorFailedError:
                # It was noticed before the second was sent.
                assert number == 2
        assert called.wait(60)
        assert "control plane failed in control plane on rank" in (plane.failure or ""), plane.failure
        assert words in (plane.failure or ""), plane.failure
        # A round that was complete when it was noticed may have been answered; the last one was not, or wrongly never.
        for number, future in enumerate(futures, 1):
            try:
                assert future.result()["note"] == number
            except ExecutorFailedError as error:
                assert words in str(error)
        assert wait_for(lambda: not any(map(is_running, pids)))


def answer_again(worker: Any, seq: int) -> None:
    _reports(worker).send(Reply(seq, 4), b"data")


def answer_too_long(worker: Any, header_bytes: int) -> None:
    _reports(worker)._socket.send(b"x" * header_bytes)


def _reports(worker: Any) -> ReportSocket:
    import gc

    return next(found for found in gc.get_objects() if isinstance(found, ReportSocket))


@pytest.mark.parametrize("seq", [0, 7])
def test_an_answer_that_comes_twice_or_unasked(seq: int) -> None:
    called = threading.Event()
    with rounds() as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        dispatcher.execute_model(SchedulerOutput(note=0))
        assert dispatcher.sample_tokens(None).result()["note"] == 0
        # Nobody waits for anything by the time it comes: the next who does hears of it.
        with pytest.raises(ExecutorFailedError, match=f"answered command {seq}, which it has answered before or was"):
            plane.call(answer_again, (seq,)).result()
            plane.call("sleep", (60,)).result()
        assert called.wait(60)


def test_an_answer_to_a_call_that_was_given_up_is_expected() -> None:
    with rounds() as (_, plane):
        with pytest.raises(TimeoutError):
            plane.call("sleep", (1,), timeout=0.2).result()
        # Both answers arrive during this call, and harm nobody.
        assert plane.call("sleep", (1.5,)).result() == {0: 0, 1: 1}
        assert plane._calls is not None and not plane._calls._given_up
        assert plane.failure is None


def test_an_oversized_report() -> None:
    with rounds() as (_, plane):
        with pytest.raises(ExecutorFailedError, match="A report's header is .* more than the limit"):
            plane.call(answer_too_long, (messages.MAX_HEADER_BYTES + 1,)).result()
            plane.call("sleep", (60,)).result()
