"""How requests end: naturally, by a client that goes away, all at once; and what comes into their place."""

from __future__ import annotations

import random

import pytest

import driver
from engine_process import EngineProcess
from engines import Reference, check, on, two_stages
from requests_and_answers import Arrival, Ask, greedy, over_time, random_prompt, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHUNKED = two_stages("chunked prefill", max_num_batched_tokens=64)


def at_once(asks: list[Ask], **arrival: int) -> list[Arrival]:
    return [Arrival(f"request-{number}", ask, **arrival) for number, ask in enumerate(asks)]


@on(CHUNKED)
def test_aborts_leave_the_others_alone(engine: EngineProcess, reference: Reference) -> None:
    arrivals = with_aborts(over_time(seed=11, count=80, longest_prompt=200, most_tokens=40, every=2), seed=11)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert sum(run.aborted) > 15


@on(CHUNKED)
def test_stop_tokens_and_stop_strings_that_occur(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(12)
    prompts = [random_prompt(rng, rng.randint(1, 60)) for _ in range(16)]
    free = reference([greedy(prompt, 40) for prompt in prompts])
    asks = []
    for number, (prompt, answer) in enumerate(zip(prompts, free, strict=True)):
        if number % 2:
            stop = {"stop_token_ids": [answer.token_ids[rng.randint(2, 30)]]}
        else:
            start = rng.randint(5, 15)
            stop = {"stop": [answer.text[start : start + 3]]}
        asks.append(greedy(prompt, 40, **stop))
    arrivals = at_once(asks)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert [answer.finish_reason for answer in run.answers] == ["stop"] * 16


@on(CHUNKED)
def test_the_models_own_end_token(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(13)
    # The bias makes the end token likely, not certain: it comes after some tokens.
    asks = [greedy(random_prompt(rng, 10), 60, ignore_eos=False, logit_bias={2: 2.0}) for _ in range(24)]
    arrivals = at_once(asks)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    ends = {len(answer.token_ids) for answer in run.answers if answer.finish_reason == "stop"}
    assert len(ends) > 3


@on(CHUNKED)
def test_requests_finish_in_the_middle_of_the_batch(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(14)
    lengths = [30, 3, 30, 5, 30, 4, 31, 1, 30, 9, 30, 30]
    arrivals = at_once([greedy(random_prompt(rng, 5), length) for length in lengths])
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)


@on(CHUNKED)
def test_one_token_each(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(15)
    arrivals = at_once([greedy(random_prompt(rng, rng.randint(1, 100)), 1) for _ in range(30)])
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    # Every sample is a request's last: no stage needs it.
    assert not any(seen.handoff for seen in run.rounds)


@on(CHUNKED)
def test_a_long_prompt_alone_is_prefilled_without_handoffs(engine: EngineProcess, reference: Reference) -> None:
    arrivals = at_once([greedy(random_prompt(random.Random(16), 480), 8)])
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    chunks = [seen for seen in run.rounds if seen.scheduled.get("request-0", 0) > 1]
    assert len(chunks) == 8
    assert [seen.handoff for seen in chunks] == [False] * 7 + [True]
    # Nothing makes a chunk wait for the one before.
    assert max(seen.in_flight for seen in chunks) > 0


@on(CHUNKED)
def test_all_aborted_at_once_and_then_others(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(17)
    first = at_once([greedy(random_prompt(rng, 20), 40) for _ in range(12)], abort_steps=12)
    # With the same ids, in the same step.
    second = at_once([greedy(random_prompt(rng, 20), 40) for _ in range(12)], step=1)
    run = engine.run(driver.drive, first + second)
    check(run, first + second, reference)
    assert run.aborted == [True] * 12 + [False] * 12
    assert all(run.answers[index].token_ids for index in range(12))


@on(CHUNKED)
def test_an_id_used_again_at_once(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(18)
    arrivals = []
    for number in range(40):
        ask = greedy(random_prompt(rng, rng.randint(1, 30)), rng.randint(1, 20))
        arrivals.append(Arrival(f"id-{number % 3}", ask, abort_steps=rng.choice([None, 3, 5, 8])))
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    # The old request of that id was still in flight when the new one began.
    assert sum(seen.in_flight_of[req_id] > 0 for seen in run.rounds for req_id in seen.admitted) > 5


def few_slots(engine: EngineProcess, reference: Reference, seed: int) -> None:
    arrivals = with_aborts(over_time(seed, count=24, longest_prompt=80, most_tokens=12, every=1), seed)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    # A slot has a new owner in the very next round with tokens, while its old owner's last round is in flight.
    with_tokens = [seen for seen in run.rounds if seen.scheduled]
    assert any(seen.admitted and seen.in_flight for seen in with_tokens[1:])


@on(two_stages("1 slot", max_num_seqs=1, max_num_batched_tokens=64))
def test_one_request_at_a_time(engine: EngineProcess, reference: Reference) -> None:
    few_slots(engine, reference, seed=21)


@on(two_stages("2 slots", max_num_seqs=2, max_num_batched_tokens=64))
def test_two_requests_at_a_time(engine: EngineProcess, reference: Reference) -> None:
    few_slots(engine, reference, seed=22)


@on(two_stages("3 slots", max_num_seqs=3, max_num_batched_tokens=64))
def test_three_requests_at_a_time(engine: EngineProcess, reference: Reference) -> None:
    few_slots(engine, reference, seed=23)
