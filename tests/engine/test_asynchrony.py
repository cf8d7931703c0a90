"""Rounds really overlap: in the scheduler, and on the clock of the two stages."""

from __future__ import annotations

import random

import pytest

import driver
from driver import Run
from engine_process import EngineProcess
from engines import on, two_stages
from requests_and_answers import Arrival, greedy, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHUNKED = two_stages("chunked prefill", max_num_batched_tokens=64)


def drive_and_time(engine: EngineProcess, arrivals: list[Arrival]) -> tuple[Run, list[dict[int, tuple[int, int]]]]:
    """A run, and for each stage when each of its rounds with tokens began and ended."""
    run = engine.run(driver.drive, arrivals)
    with_tokens = {seen.number for seen in run.rounds if seen.scheduled}
    times = [
        {number: (begin, end) for number, begin, end in rounds if number in with_tokens}
        for rounds in engine.run(driver.timelines)
    ]
    assert [set(stage) for stage in times] == [with_tokens] * 2
    return run, times


def begun_early(first: dict[int, tuple[int, int]], last: dict[int, tuple[int, int]]) -> list[int]:
    """Rounds that the first stage began before the last stage had finished the one before."""
    return [number for number in first if number - 1 in last and first[number][0] < last[number - 1][1]]


@on(CHUNKED)
def test_a_request_has_several_rounds_in_flight(engine: EngineProcess) -> None:
    run, (first, last) = drive_and_time(engine, [Arrival("alone", greedy(random_prompt(random.Random(31), 10), 40))])
    # Scheduled again before the token of its last round was collected, which is what that round is to begin from.
    decodes = [seen for seen in run.rounds if seen.scheduled == {"alone": 1}]
    assert len(decodes) == 39
    assert sum(seen.in_flight_of["alone"] >= 1 for seen in decodes) > 30
    assert len(begun_early(first, last)) > len(first) / 2


@on(CHUNKED)
def test_the_first_stage_runs_ahead_with_many_requests(engine: EngineProcess) -> None:
    rng = random.Random(32)
    arrivals = [Arrival(f"request-{n}", greedy(random_prompt(rng, 20), 40), step=n) for n in range(16)]
    _, (first, last) = drive_and_time(engine, arrivals)
    assert len(begun_early(first, last)) > len(first) / 2
    assert engine.run(driver.executor_stats)["max_in_flight"] >= 2


@on(CHUNKED)
def test_the_first_stage_runs_ahead_through_a_long_prompt(engine: EngineProcess) -> None:
    before = engine.run(driver.executor_stats)
    run, (first, last) = drive_and_time(engine, [Arrival("long", greedy(random_prompt(random.Random(33), 500), 1))])
    after = engine.run(driver.executor_stats)
    assert [seen.scheduled["long"] for seen in run.rounds if seen.scheduled] == [64] * 7 + [52]
    assert len(begun_early(first, last)) >= 4
    # Neither an unfinished chunk nor a last token is handed to anybody.
    assert after["handoffs"] == before["handoffs"]
    assert after["handoffs_not_needed"] == before["handoffs_not_needed"] + 8
