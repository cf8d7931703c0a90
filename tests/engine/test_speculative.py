"""Speculative decoding over two stages: drafts are proposed on the last, embedded on the first, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

import driver
import models
from driver import Run
from engine_process import EngineProcess
from engines import EXECUTOR, SMALL, Reference, check, on, running, two_stages
from requests_and_answers import Arrival, changed, greedy, over_time, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

DRAFTS = 3
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
# 18 blocks of 32 tokens, as in test_exactness.py.
LITTLE_KV = two_stages(
    "n-grams, little KV space", speculative_config=NGRAM, max_num_batched_tokens=64, block_size=32,
    kv_cache_memory_bytes=18 * 32 * 1024, enable_prefix_caching=False,
)  # fmt: skip


def accepted(run: Run) -> float:
    """Tokens a decoding row and round."""
    rows = sum(tokens == 1 + DRAFTS for seen in run.rounds for tokens in seen.scheduled.values())
    return sum(len(answer.token_ids) for answer in run.answers) / rows


@on(LITTLE_KV)
def test_ngrams(engine: EngineProcess, reference: Reference) -> None:
    arrivals = with_aborts(over_time(seed=3, count=48, longest_prompt=120, most_tokens=120, every=1), seed=3)
    # Random weights seldom repeat themselves; with four tokens to choose from they must.
    arrivals[::2] = [
        arrival._replace(ask=changed(arrival.ask, allowed_token_ids=[8, 9, 10, 11])) for arrival in arrivals[::2]
    ]
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    assert run.preemptions > 0
    # Rounds of one request overlap, drafts and all.
    assert any(count for seen in run.rounds for count in seen.in_flight_of.values())
    assert accepted(run) > 1.2


@on(LITTLE_KV)
def test_sampling_options_see_the_drafts_before_them(engine: EngineProcess, reference: Reference) -> None:
    """Penalties and least lengths depend on the tokens before, of which some are drafts."""
    kinds = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"min_tokens": 8, "stop_token_ids": list(range(8, 120))},
        {"stop_token_ids": list(range(8, 64))},
        {"allowed_token_ids": list(range(100, 140))},
        {},
    ]
    asks = [changed(greedy(range(20 + i, 60 + i), 40), **kinds[i % len(kinds)]) for i in range(3 * len(kinds))]
    arrivals = [Arrival(f"request-{i}", ask, step=i) for i, ask in enumerate(asks)]
    check(engine.run(driver.drive, arrivals), arrivals, reference)


@on(LITTLE_KV)
def test_a_grammar_lets_drafts_through(engine: EngineProcess, reference: Reference) -> None:
    """Two requests with a grammar in rounds of their own, and a free one between: each still uses its drafts."""
    # Every token is forced (no token of two letters is allowed), and after the first four foreseen.
    word = {
        "structured_outputs": {"regex": "(abcd){12}"}, "ignore_eos": False, "allowed_token_ids": [2, 67, 68, 69, 70],
    }  # fmt: skip
    asks = [
        changed(greedy(range(20, 30), 60), **word),
        greedy(range(30, 35), 60),
        changed(greedy(range(9, 40), 60), **word),
    ]
    arrivals = [Arrival(f"request-{i}", ask, step=3 * i) for i, ask in enumerate(asks)]
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    for arrival, answer in list(zip(arrivals, run.answers))[::2]:
        rounds = sum(seen.scheduled.get(arrival.req_id, 0) > 0 for seen in run.rounds)
        assert rounds < 0.5 * len(answer.token_ids), (rounds, answer)


ARRIVALS = with_aborts(over_time(seed=5, count=24, longest_prompt=120, most_tokens=40, every=1), seed=5)


def test_multi_token_prediction(tiny_mtp: Path, tmp_path: Path) -> None:
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    args = {**SMALL, "distributed_executor_backend": EXECUTOR, "pipeline_parallel_size": 2, "speculative_config": mtp}
    reference = Reference(tmp_path, tiny_mtp)
    try:
        with running(tmp_path, driver.start, model=str(tiny_mtp), max_num_batched_tokens=64, **args) as engine:
            run = engine.run(driver.drive, ARRIVALS)
        check(run, ARRIVALS, reference)
    finally:
        reference.close()
    rows = sum(tokens == 3 for seen in run.rounds for tokens in seen.scheduled.values())
    assert sum(len(answer.token_ids) for answer in run.answers) > 1.15 * rows


@pytest.mark.parametrize(
    ("method", "draft", "stages", "least"),
    [("eagle", "tiny-eagle", 2, 0.0), ("eagle3", "tiny-eagle3", 4, 0.0), ("draft_model", "tiny-llama", 2, 1.25)],
)
def test_proposers_with_a_model_of_their_own(
    tiny_llama: Path, tmp_path: Path, reference: Reference, method: str, draft: str, stages: int, least: float
) -> None:
    """EAGLE3's reads states of layers on every stage, which travel with the hop; a draft model is whole on the last."""
    speculative = {"method": method, "model": str(models.get(draft)), "num_speculative_tokens": DRAFTS}
    args = {**SMALL, "distributed_executor_backend": EXECUTOR, "pipeline_parallel_size": stages}
    args |= {"speculative_config": speculative, "max_num_batched_tokens": 64}
    with running(tmp_path, driver.start, model=str(tiny_llama), **args) as engine:
        run = engine.run(driver.drive, ARRIVALS)
    check(run, ARRIVALS, reference)
    rows = sum(tokens == 1 + DRAFTS for seen in run.rounds for tokens in seen.scheduled.values())
    kept = [answer for answer, aborted in zip(run.answers, run.aborted) if not aborted]
    # A model that is its own draft is right each time, but for the rounds in flight when a request ends.
    assert rows and sum(len(answer.token_ids) for answer in kept) / rows > least
