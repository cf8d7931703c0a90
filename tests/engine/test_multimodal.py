"""Prompts with sounds over several stages: the first encodes them, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import driver
from driver import Run
from engines import EXECUTOR, SMALL, Reference, check, running
from requests_and_answers import Arrival, greedy, over_time, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# The token in whose place a sound comes, of the tiny model.
SOUND = 3
# 12, 37 and 99 tokens; the last is longer than a round.
LENGTHS = (8_000, 24_000, 63_600)
ROUND_TOKENS = 64
DRAFTS = 3
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def hearing(tiny_audio: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """What every answer is compared with."""
    reference = Reference(tmp_path_factory.mktemp("reference"), tiny_audio)
    yield reference
    reference.close()


def with_sounds(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """Up to two sounds, anywhere in the prompt; every fourth request has none."""
    rng = random.Random(seed)
    heard = []
    for number, arrival in enumerate(arrivals):
        prompt, sounds = list(arrival.ask.prompt), []
        for _ in range(0 if number % 4 == 3 else rng.randint(1, 2)):
            sounds.append(rng.choice(LENGTHS))
            prompt.insert(rng.randint(0, len(prompt)), SOUND)
        ask = greedy(prompt, 1 + number % 40)._replace(sounds=tuple(sounds))
        heard.append(arrival._replace(ask=ask))
    return heard


def _drive(folder: Path, model: Path, arrivals: list[Arrival], **args: object) -> Run:
    args = {**SMALL, "distributed_executor_backend": EXECUTOR, "max_num_batched_tokens": ROUND_TOKENS, **args}
    with running(folder, driver.start, model=str(model), **args) as engine:
        return engine.run(driver.drive, arrivals)


def test_sounds_with_little_kv_space(tiny_audio: Path, tmp_path: Path, hearing: Reference) -> None:
    arrivals = with_aborts(
        with_sounds(over_time(seed=11, count=40, longest_prompt=60, most_tokens=40, every=1), 11), 11
    )
    run = _drive(tmp_path, tiny_audio, arrivals, pipeline_parallel_size=2, kv_cache_memory_bytes=24 * 32 * 1024)
    check(run, arrivals, hearing)
    assert run.preemptions > 0
    # That the sounds count: the same prompt with another one is answered otherwise.
    ask = greedy([20, SOUND, 30, 40], 8)
    assert len(set(hearing([ask._replace(sounds=(length,)) for length in LENGTHS]))) == len(LENGTHS)
    assert any(count for seen in run.rounds for count in seen.in_flight_of.values())


def test_sounds_with_drafts_and_four_stages(tiny_audio: Path, tmp_path: Path, hearing: Reference) -> None:
    arrivals = with_aborts(
        with_sounds(over_time(seed=12, count=24, longest_prompt=60, most_tokens=40, every=1), 12), 12
    )
    run = _drive(tmp_path, tiny_audio, arrivals, pipeline_parallel_size=4, speculative_config=NGRAM)
    check(run, arrivals, hearing)
    # Drafts were verified: rounds in which a request that decodes has several tokens.
    assert sum(tokens == 1 + DRAFTS for seen in run.rounds for tokens in seen.scheduled.values()) > len(arrivals)
