"""More ranks than two: four stages, with drafts too, and two stages of two tensor-parallel ranks each."""

from __future__ import annotations

import pytest

import driver
from engine_process import EngineProcess
from engines import Reference, check, on, two_stages
from requests_and_answers import changed, over_time, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SMALL_CHUNKS = {"max_num_batched_tokens": 64}
FOUR_STAGES = two_stages("four stages", pipeline_parallel_size=4, **SMALL_CHUNKS)
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# The stages between embed nothing, and must know all the same how many drafts were rejected.
FOUR_WITH_DRAFTS = two_stages(
    "four stages, n-grams", pipeline_parallel_size=4, speculative_config=NGRAM, **SMALL_CHUNKS
)
TWO_BY_TWO = two_stages("two stages of two", tensor_parallel_size=2, **SMALL_CHUNKS)
ARRIVALS = with_aborts(over_time(seed=43, count=24, longest_prompt=120, most_tokens=40, every=1), seed=43)


@on(FOUR_STAGES)
def test_four_stages(engine: EngineProcess, reference: Reference) -> None:
    run = engine.run(driver.drive, ARRIVALS)
    check(run, ARRIVALS, reference)
    assert any(seen.handoff for seen in run.rounds)
    # Two rounds a stage.
    assert max(seen.in_flight for seen in run.rounds) > 4


@on(FOUR_WITH_DRAFTS)
def test_four_stages_with_drafts(engine: EngineProcess, reference: Reference) -> None:
    # With four tokens to choose from, what follows is often what followed before.
    arrivals = [
        arrival._replace(ask=changed(arrival.ask, allowed_token_ids=[8, 9, 10, 11]) if i % 2 else arrival.ask)
        for i, arrival in enumerate(ARRIVALS)
    ]
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert max(seen.in_flight for seen in run.rounds) > 4


@on(TWO_BY_TWO)
def test_two_stages_of_two_ranks(engine: EngineProcess, reference: Reference) -> None:
    run = engine.run(driver.drive, ARRIVALS)
    check(run, ARRIVALS, reference)
    assert any(seen.handoff for seen in run.rounds)
