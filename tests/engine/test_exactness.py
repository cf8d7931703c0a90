"""Two stages, asynchronous: the token ids and finish reasons of vLLM's own synchronous run on one stage."""

from __future__ import annotations

import pytest

import driver
from driver import Run
from engine_process import EngineProcess
from engines import Reference, check, on, two_stages
from requests_and_answers import Arrival, changed, over_time, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Prompts of up to 300 tokens take several rounds.
CHUNKS = {"max_num_batched_tokens": 64, "block_size": 32}
CHUNKED = two_stages("chunked prefill", **CHUNKS, enable_prefix_caching=False)
CACHED = two_stages("prefix caching", **CHUNKS, enable_prefix_caching=True)
# 18 blocks of 32 tokens: room for the longest request that the model allows, not for sixteen.
# A token takes 1024 bytes on each stage: 2 layers x 2 heads x 32 x (key and value) x 4 bytes.
LITTLE_KV = two_stages("little KV space", **CHUNKS, kv_cache_memory_bytes=18 * 32 * 1024, enable_prefix_caching=False)


def chunks_beside_decodes(run: Run, arrivals: list[Arrival]) -> int:
    """Rounds with a part of a prompt and a decoding request."""
    prompt = {arrival.req_id: len(arrival.ask.prompt) for arrival in arrivals}
    return sum(
        any(1 < tokens < prompt[req_id] for req_id, tokens in seen.scheduled.items()) and 1 in seen.scheduled.values()
        for seen in run.rounds
    )


@on(CHUNKED)
def test_prefill_in_chunks_beside_decodes(engine: EngineProcess, reference: Reference) -> None:
    arrivals = over_time(seed=1, count=64, longest_prompt=300, most_tokens=40, every=3)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert chunks_beside_decodes(run, arrivals) > 20


@on(CACHED)
def test_prompts_found_in_the_prefix_cache(engine: EngineProcess, reference: Reference) -> None:
    arrivals = over_time(seed=1, count=64, longest_prompt=300, most_tokens=40, every=3)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert chunks_beside_decodes(run, arrivals) > 20
    computed = sum(sum(seen.scheduled.values()) for seen in run.rounds)
    lengths = (len(arrival.ask.prompt) + len(answer.token_ids) for arrival, answer in zip(arrivals, run.answers))
    # A request's last token is never computed with. Ten blocks at least came from the cache.
    assert computed <= sum(length - 1 for length in lengths) - 10 * CHUNKS["block_size"]


@on(LITTLE_KV)
def test_preemptions(engine: EngineProcess, reference: Reference) -> None:
    arrivals = over_time(seed=3, count=48, longest_prompt=120, most_tokens=120, every=1)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert run.preemptions > 10
    # Some are thrown out while a round of theirs is in flight: its token arrives in another life of the request.
    before = [{}, *(seen.in_flight_of for seen in run.rounds)]
    assert any(earlier.get(r) for earlier, seen in zip(before, run.rounds) for r in seen.preempted)


@on(LITTLE_KV)
def test_preemptions_and_aborts(engine: EngineProcess, reference: Reference) -> None:
    arrivals = with_aborts(over_time(seed=4, count=64, longest_prompt=100, most_tokens=120, every=1), seed=4)
    # Penalties count what a request has said so far, also in an earlier life.
    for number, arrival in enumerate(arrivals):
        if number % 3:
            ask = changed(arrival.ask, repetition_penalty=1.2, frequency_penalty=0.1)
            arrivals[number] = arrival._replace(ask=ask)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert run.preemptions > 5
    assert sum(run.aborted) > 10
