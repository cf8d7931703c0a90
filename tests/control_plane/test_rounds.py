"""Rounds: one message each, vLLM's two calls for them, and what the workers see."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fake_worker import EMPTY, SchedulerOutput, rounds, with_manifest
from vllm_handoff.executor.errors import ExecutorFailedError
from vllm_handoff.scheduler_ext.manifest import Row, Rows, manifest_of

pytestmark = pytest.mark.timeout(120)

ROW = Rows.of(Row("a", 0, True))


def test_execute_completes_at_once_and_sampling_sends_nothing() -> None:
    with rounds() as (dispatcher, plane):
        seq = plane._next_seq
        execute = dispatcher.execute_model(SchedulerOutput(note="x", act={"execute_model": "sleep"}, seconds=0.5))
        assert execute.done() and execute.result() is None
        result = dispatcher.sample_tokens(None)
        assert plane._next_seq == seq + 1
        assert result.result() == {"note": "x", "grammar": None, "rank": 1}


def test_the_forward_of_a_structured_round_starts_before_its_grammar_comes() -> None:
    with rounds() as (dispatcher, plane):
        execute = dispatcher.execute_model(SchedulerOutput(note="x", has_structured_output_requests=True))
        # What vLLM's plain step does: await this before it computes the grammar.
        assert execute.result(30) is None
        assert plane.call("get_log").result()[0] == [("execute", "x", None)]
        assert dispatcher.sample_tokens({"mask": 1}).result()["grammar"] == {"mask": 1}


def test_a_structured_round_may_turn_out_to_have_no_grammar() -> None:
    with rounds() as (dispatcher, _):
        dispatcher.execute_model(SchedulerOutput(has_structured_output_requests=True))
        assert dispatcher.sample_tokens(None).result()["grammar"] is None


def test_a_grammar_for_a_round_without_structured_requests_is_refused() -> None:
    with rounds() as (dispatcher, _):
        dispatcher.execute_model(SchedulerOutput())
        with pytest.raises(RuntimeError, match="Round 0: a grammar came"):
            dispatcher.sample_tokens({"mask": 1})


def test_sampling_without_a_round_is_refused() -> None:
    with rounds() as (dispatcher, _), pytest.raises(RuntimeError, match="no round waits"):
        dispatcher.sample_tokens(None)


@pytest.mark.parametrize(
    ("samples", "output"),
    [
        (True, SchedulerOutput(total_num_scheduled_tokens=0, note="none")),
        (False, SchedulerOutput(note="pooled")),
        (False, SchedulerOutput(note="pooled", has_structured_output_requests=True)),
    ],
)
def test_without_sampling_the_first_future_is_the_round(samples: bool, output: SchedulerOutput) -> None:
    with rounds(samples=samples) as (dispatcher, _):
        assert dispatcher.execute_model(output).result() == {"note": output.note, "rank": 1}


def test_an_early_result_of_a_sampling_model_is_the_result() -> None:
    with rounds() as (dispatcher, plane):
        dispatcher.execute_model(SchedulerOutput(note="pooled"))
        assert dispatcher.sample_tokens(None).result() == {"note": "pooled", "rank": 1}
        assert ("sample", "pooled", None) not in plane.call("get_log").result()[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_several_rounds_in_flight_awaited_in_any_order(is_async: bool) -> None:
    with rounds(is_async=is_async) as (dispatcher, _):
        futures = []
        for i in range(8):
            dispatcher.execute_model(SchedulerOutput(note=i, act={"sample_tokens": "sleep"}, seconds=0.02))
            futures.append(dispatcher.sample_tokens(None))
        results = [future.result() for future in reversed(futures)]
        assert [result["note"] for result in results] == list(reversed(range(8)))
        threads = {result.get("thread", "MainThread") for result in results}
        assert threads == ({"handoff-output"} if is_async else {"MainThread"})
        assert dispatcher.stats.max_in_flight == 8


def test_the_engines_work_is_counted_and_not_its_waiting() -> None:
    with rounds() as (dispatcher, _):

        def send() -> int:
            dispatcher.execute_model(SchedulerOutput(note="x"))
            dispatcher.sample_tokens(None).result()
            return dispatcher.stats.engine_ns

        before, worked = send(), time.thread_time() + 0.05
        time.sleep(0.5)
        while time.thread_time() < worked:
            pass
        assert 0.05 <= (send() - before) / 1e9 < 0.5


def test_the_main_thread_finishes_an_output_that_has_arrived() -> None:
    with rounds(is_async=True) as (dispatcher, _):

        def send(note: str) -> Any:
            dispatcher.execute_model(SchedulerOutput(note=note))
            return dispatcher.sample_tokens(None)

        # The first, which cannot be asked, goes to the thread; what is put while that is busy follows it.
        sent = [send(note) for note in ("unknown", *["arrived"] * 3)]
        assert sent[0].result()["thread"] == "handoff-output"
        assert [future.result()["note"] for future in sent[1:]] == ["arrived"] * 3
        # The thread is busy until it has noted that it is done, a moment after the answer.
        assert any(send("arrived").result()["thread"] == "MainThread" for _ in range(200))


def test_an_output_that_is_slow_to_arrive_delays_no_later_round() -> None:
    with rounds(is_async=True) as (dispatcher, plane):
        dispatcher.execute_model(SchedulerOutput(note=0, act={"get_output": "sleep"}, seconds=0.5))
        slow = dispatcher.sample_tokens(None)
        assert plane.call("get_log").result()[1] == [("execute", 0, None), ("sample", 0, None)]
        assert not slow.done()
        assert slow.result()["note"] == 0


def test_workers_get_the_manifest_and_the_engine_keeps_it() -> None:
    with rounds() as (dispatcher, plane):
        output = with_manifest(SchedulerOutput(note="x"), round=0, rows=ROW)
        dispatcher.execute_model(output)
        manifest = manifest_of(output)
        assert manifest is not None and manifest.rows == ROW
        dispatcher.sample_tokens(None).result()
        log: list[Any] = plane.call("get_log").result()[0]
        assert log[0] == ("execute", "x", 0)


def test_a_round_that_is_not_dispatched_is_answered_here() -> None:
    with rounds() as (dispatcher, plane):
        for number in (0, 1, 2):
            skipped = number == 1
            output = SchedulerOutput(note=number, total_num_scheduled_tokens=0 if skipped else 1)
            future = dispatcher.execute_model(with_manifest(output, round=number, dispatch=not skipped))
            if skipped:
                assert future.done() and future.result() is EMPTY
            else:
                dispatcher.sample_tokens(None).result()
        # The gap in the numbers is no gap in the workers' stream.
        executed = [entry for entry in plane.call("get_log").result()[0] if entry[0] == "execute"]
        assert executed == [("execute", 0, 0), ("execute", 2, 2)]


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_gap_or_a_repeat_in_the_schedule_is_refused(wrong: int) -> None:
    with rounds() as (dispatcher, _):
        dispatcher.execute_model(with_manifest(SchedulerOutput(), round=0))
        with pytest.raises(ValueError, match=f"Round {wrong} was scheduled where round 1 was due"):
            dispatcher.execute_model(with_manifest(SchedulerOutput(), round=wrong))


def test_a_worker_refuses_a_gap_in_its_stream() -> None:
    with rounds() as (dispatcher, _):
        dispatcher.execute_model(SchedulerOutput(note=0))
        dispatcher.sample_tokens(None).result()
        dispatcher._last_dispatched = 5
        dispatcher.execute_model(SchedulerOutput(note=1))
        with pytest.raises(ExecutorFailedError, match="round 1 was sent to follow round 5.*last round is 0"):
            dispatcher.sample_tokens(None).result()


def test_all_ranks_reply_to_an_aggregator() -> None:
    with rounds() as (dispatcher, _):
        dispatcher.execute_model(SchedulerOutput(note="x"), aggregate=lambda outputs: [o["rank"] for o in outputs])
        assert dispatcher.sample_tokens(None).result() == [0, 1]


def test_calls_keep_their_place_among_rounds() -> None:
    with rounds() as (dispatcher, plane):
        dispatcher.execute_model(SchedulerOutput(note=0))
        first = dispatcher.sample_tokens(None)
        call = plane.call("add", (7,))
        dispatcher.execute_model(SchedulerOutput(note=1))
        second = dispatcher.sample_tokens(None)
        log = plane.call("get_log").result()[1]
        assert [entry[0] for entry in log] == ["execute", "sample", "add", "execute", "sample"]
        assert (second.result()["note"], call.result()[0], first.result()["note"]) == (1, 7, 0)


def test_stats() -> None:
    with rounds() as (dispatcher, _):
        plan = [
            (SchedulerOutput(5), {"rows": ROW}),
            (SchedulerOutput(3), {}),
            (SchedulerOutput(0), {"dispatch": False}),
            (SchedulerOutput(0, note="drain"), {"needs": (0,)}),
        ]
        for number, (output, fields) in enumerate(plan):
            future = dispatcher.execute_model(with_manifest(output, round=number, **fields))
            (dispatcher.sample_tokens(None) if output.total_num_scheduled_tokens else future).result()
        stats = dispatcher.stats
        assert (stats.rounds, stats.rounds_not_dispatched, stats.tokens) == (3, 1, 8)
        assert (stats.handoffs, stats.handoffs_not_needed, stats.max_in_flight) == (1, 1, 1)
