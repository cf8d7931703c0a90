"""Hundreds of requests through a model in which one misplaced token is seen at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import driver
from driver import Run, State
from engine_process import EngineProcess
from engines import SMALL, running, two_stages
from requests_and_answers import Answer, Arrival, greedy, with_aborts
from vllm_handoff.stress import toy_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CONTEXT = 256
LAYERS = 2
# A token takes, on each stage with its one layer: 1 head x HEAD_SIZE x (key and value) x 4 bytes.
KV_BYTES_PER_BLOCK = 32 * toy_tokens.HEAD_SIZE * 2 * 4
TOY: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": CONTEXT,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,
    "block_size": 32,
}


def start_toy(state: State, **args: Any) -> None:
    from vllm_handoff.stress import toy_model

    toy_model.register()
    driver.start(state, **args)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Two stages, and KV space for 20 blocks: two of the longest requests."""
    folder = tmp_path_factory.mktemp("toy")
    args = {**SMALL, **two_stages("toy").args, **TOY, "kv_cache_memory_bytes": 20 * KV_BYTES_PER_BLOCK}
    with running(
        folder, start_toy, model=str(toy_tokens.write_folder(folder / "model", LAYERS, CONTEXT)), **args
    ) as process:
        yield process


def toy_requests(seed: int, count: int, every: float) -> tuple[list[Arrival], list[Answer]]:
    """Requests under a few ids, used again and again, and their answers.

    One in four ends at a stop token, some at the end of the context, the others at max_tokens.
    """
    rng = random.Random(seed)
    arrivals, answers, step = [], [], 0.0
    for number in range(count):
        prompt = tuple(rng.randrange(toy_tokens.VOCABULARY) for _ in range(rng.choice([1, 2, 31, 32, 33, 90, 200])))
        params = {"max_tokens": rng.randint(1, 70), "ignore_eos": True}
        tokens = tuple(toy_tokens.answer(prompt, params, LAYERS, CONTEXT)[0])
        stop = tokens[rng.randrange(len(tokens))] if rng.random() < 0.25 else None
        max_tokens = len(tokens) if len(prompt) + len(tokens) < CONTEXT else CONTEXT
        ask = greedy(prompt, max_tokens, stop_token_ids=[] if stop is None else [stop])
        arrivals.append(Arrival(f"id-{number % 60}", ask, int(step)))
        answers.append(
            Answer(tokens, "length") if stop is None else Answer(tokens[: tokens.index(stop) + 1], "stop", stop)
        )
        step += rng.uniform(0, 2 * every)
    return with_aborts(arrivals, seed), answers


def check(run: Run, answers: list[Answer]) -> None:
    for number, (found, aborted, wanted) in enumerate(zip(run.answers, run.aborted, answers, strict=True)):
        if aborted:
            assert found.token_ids == wanted.token_ids[: len(found.token_ids)], number
        else:
            assert found == wanted, number


def test_a_crowd_in_little_kv_space(engine: EngineProcess) -> None:
    arrivals, answers = toy_requests(seed=1, count=400, every=1)
    run = engine.run(driver.drive, arrivals)
    check(run, answers)
    assert run.preemptions > 30
    assert sum(run.aborted) > 60
    assert {answer.finish_reason for answer in run.answers} == {"stop", "length", None}


def test_few_at_a_time_with_pauses(engine: EngineProcess) -> None:
    arrivals, answers = toy_requests(seed=2, count=100, every=40)
    run = engine.run(driver.drive, arrivals)
    check(run, answers)
    assert any(not seen.in_flight for seen in run.rounds[100:])
