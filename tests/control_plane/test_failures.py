"""Failures: whichever stage fails, in whichever phase, the engine hears it with the cause, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from fake_worker import MARK, SchedulerOutput, control_plane, is_running, rounds, wait_for
from vllm_handoff.executor.errors import ExecutorFailedError
from vllm_handoff.executor.messages import REPORTED_EXIT, Failure
from vllm_handoff.executor.rounds import RoundDispatcher
from vllm_handoff.executor.supervisor import Evidence, describe_exit

pytestmark = pytest.mark.timeout(120)


def send(dispatcher: RoundDispatcher, **fields: Any) -> Future:
    dispatcher.execute_model(SchedulerOutput(**fields))
    return dispatcher.sample_tokens(None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["execute_model", "sample_tokens"])
def test_an_exception_in_a_round_fails_everything_in_flight(rank: int, phase: str) -> None:
    called = threading.Event()
    with rounds() as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        assert send(dispatcher, note=0).result()["note"] == 0
        failing = send(dispatcher, note=1, act={phase: "raise"}, rank=rank)
        # Rank 1 is still at it when rank 0 fails.
        after = send(dispatcher, note=2, act={"execute_model": "sleep"}, rank=1, seconds=5)
        call = plane.call("add", (1,))
        # These stages do not wait for each other, so the last one may have answered the round that failed on rank 0.
        for future in [call, after, *([failing] if rank == 1 else [])]:
            with pytest.raises(ExecutorFailedError) as caught:
                future.result()
            text = str(caught.value)
            assert f"round 1 failed in {phase} on rank {rank} (stage {rank}): ValueError: {MARK}" in text
            assert "Traceback" in text and "in _do" in text
        assert called.wait(30)
        with pytest.raises(ExecutorFailedError, match="round 1 failed"):
            send(dispatcher)
        with pytest.raises(ExecutorFailedError, match="round 1 failed"):
            plane.call("add", (1,))


def test_an_exception_on_the_output_thread_is_a_round_failure() -> None:
    with rounds(is_async=True) as (dispatcher, _):
        with pytest.raises(ExecutorFailedError, match=rf"round 0 failed in get_output on rank 1 .*{MARK}"):
            send(dispatcher, act={"get_output": "raise"}).result()


def test_a_round_without_output_is_a_failure() -> None:
    with rounds() as (dispatcher, _):
        with pytest.raises(ExecutorFailedError, match="returned no output for a round"):
            send(dispatcher, note="nothing").result()


def test_a_death_is_heard_while_everybody_is_stuck() -> None:
    with rounds() as (dispatcher, plane):
        pids = plane.pids
        plane.call("block")
        future = send(dispatcher)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorFailedError, match=r"rank 0 \(stage 0\) was killed by SIGKILL"):
            future.result()
        assert wait_for(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "words"), [("sigkill", "was killed by SIGKILL"), ("exit", "exited with code 3"), ("sigstop", "is stopped")]
)
def test_a_worker_that_dies_or_stops_in_a_round_is_named(rank: int, how: str, words: str) -> None:
    called = threading.Event()
    with rounds() as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        pids = plane.pids
        future = send(dispatcher, act={"execute_model": how}, rank=rank)
        after = send(dispatcher, act={"execute_model": "block"}, rank=1 - rank)
        with pytest.raises(ExecutorFailedError, match=rf"rank {rank} \(stage {rank}\) {words}"):
            after.result()
        if rank == 1:
            with pytest.raises(ExecutorFailedError):
                future.result()
        assert called.wait(30)
        # The stuck peer is ended too, without anybody's shutdown.
        assert wait_for(lambda: not any(map(is_running, pids)))


def test_a_worker_that_dies_while_nothing_is_asked_of_it_is_noticed() -> None:
    called = threading.Event()
    with control_plane() as plane:
        plane.register_failure_callback(called.set)
        os.kill(plane.pids[0], signal.SIGKILL)
        assert called.wait(30)
        assert plane.failure is not None and "rank 0 (stage 0) was killed by SIGKILL" in plane.failure
        # Who registers too late is told at once.
        late = threading.Event()
        plane.register_failure_callback(late.set)
        assert late.is_set()


def test_a_failed_round_is_noticed_although_nobody_awaits_it() -> None:
    called = threading.Event()
    with rounds() as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        send(dispatcher, act={"execute_model": "raise"}, rank=0)
        assert called.wait(30)
        assert plane.failure is not None and "round 0 failed in execute_model on rank 0" in plane.failure


def test_a_round_that_is_never_answered_times_out_by_name(capfd: pytest.CaptureFixture) -> None:
    seen = ""
    with rounds(timeout=0.5) as (dispatcher, plane):
        future = send(dispatcher, act={"execute_model": "block"}, rank=1)
        with pytest.raises(ExecutorFailedError, match=r"round 0: no reply from rank 1 \(stage 1\) within 0.5 s"):
            future.result()
        assert plane.failure is not None

        def shown() -> bool:
            nonlocal seen
            seen += capfd.readouterr().err
            return "in execute_model" in seen

        # Where the stage hangs, from the stage itself.
        assert wait_for(shown)


def test_a_round_that_nobody_awaits_is_not_held_against_a_short_wait() -> None:
    with rounds() as (dispatcher, plane):
        future = send(dispatcher, note=0, act={"execute_model": "sleep"}, seconds=0.5)
        with pytest.raises(TimeoutError):
            future.result(0.01)
        assert future.result()["note"] == 0
        assert plane.failure is None


def test_children_of_a_dead_worker_are_ended() -> None:
    with control_plane() as plane:
        children = plane.call("start_child").result()
        os.kill(plane.pids[1], signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_running, children.values())))


def failure(where: str, at: int, error: str = "ValueError: x") -> Failure:
    return Failure(True, where, "execute_model", error, f"Traceback of {where}", at)


def test_the_earliest_report_is_the_cause() -> None:
    evidence = Evidence(lambda rank: f"rank {rank}")
    evidence.reports = [
        (0, failure("round 8", at=20, error="connection closed by peer")),
        (1, failure("round 7", at=10)),
    ]
    evidence.exits = {0: REPORTED_EXIT, 1: REPORTED_EXIT}
    cause = evidence.cause()
    assert cause.startswith("round 7 failed in execute_model on rank 1: ValueError: x\nTraceback of round 7")
    assert "Also: round 8 failed in execute_model on rank 0: connection closed by peer" in cause


def test_an_exit_after_a_report_waits_for_the_report() -> None:
    evidence = Evidence(lambda rank: f"rank {rank}")
    evidence.exits = {0: REPORTED_EXIT}
    assert evidence.awaits_report()
    evidence.reports = [(0, failure("round 8", at=20))]
    assert not evidence.awaits_report()


def test_a_silent_death_comes_before_what_its_peers_report() -> None:
    evidence = Evidence(lambda rank: f"rank {rank}")
    evidence.reports = [(0, failure("round 8", at=20, error="connection closed by peer"))]
    evidence.exits = {1: -9, 0: REPORTED_EXIT}
    assert evidence.cause().startswith("rank 1 was killed by SIGKILL without a report")


def test_a_full_shared_memory_is_named() -> None:
    evidence = Evidence(lambda rank: f"rank {rank}")
    evidence.exits = {1: -signal.SIGBUS}
    assert "rank 1 was killed by SIGBUS" in evidence.cause() and "/dev/shm is full" in evidence.cause()


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exited with code 0"), (3, "exited with code 3"), (-9, "was killed by SIGKILL"), (None, "unknown")],
)
def test_exits_in_words(code: int | None, words: str) -> None:
    assert words in describe_exit(code)
