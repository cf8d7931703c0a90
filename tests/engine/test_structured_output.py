"""Structured output beside free requests: valid, and the same tokens as vLLM's own."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

import driver
from engine_process import EngineProcess
from engines import EXECUTOR, SMALL, Reference, check, on, running, two_stages
from requests_and_answers import Arrival, changed, greedy, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CHUNKED = two_stages("chunked prefill", max_num_batched_tokens=64)
# 18 blocks of 32 tokens of 1024 bytes.
LITTLE_KV = two_stages(
    "little KV space",
    max_num_batched_tokens=64,
    block_size=32,
    kv_cache_memory_bytes=18 * 32 * 1024,
    enable_prefix_caching=False,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "open": {"type": "boolean"},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["open", "colour", "sizes"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,6}-[0-9]{3}(x|yy)?"
CHOICES = ["yes", "no", "perhaps"]
KINDS: dict[str, dict[str, Any]] = {"json": {"json": SCHEMA}, "regex": {"regex": REGEX}, "choice": {"choice": CHOICES}}


def _mixed(count: int, seed: int, **params: Any) -> tuple[list[Arrival], list[str]]:
    """Requests of each kind in turn, and free ones, and which kind each is."""
    rng = random.Random(seed)
    arrivals, kinds, step = [], [], 0
    for number in range(count):
        kind = [*KINDS, "free"][number % 4]
        structured = {} if kind == "free" else {"structured_outputs": KINDS[kind]}
        # The grammar ends a text with the end token, which therefore must count.
        ask = greedy(random_prompt(rng, rng.randint(1, 90)), 100, ignore_eos=kind == "free", **structured, **params)
        arrivals.append(Arrival(f"{kind}-{number}", ask, step))
        kinds.append(kind)
        step += rng.randint(0, 6)
    return arrivals, kinds


def _check_valid(kind: str, text: str) -> None:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "regex":
        assert re.fullmatch(REGEX, text), text
    elif kind == "choice":
        assert text in CHOICES


@on(CHUNKED)
def test_beside_free_requests(engine: EngineProcess, reference: Reference) -> None:
    arrivals, kinds = _mixed(32, seed=71)
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    for kind, answer, text in zip(kinds, run.answers, engine.run(driver.texts, run.answers), strict=True):
        _check_valid(kind, text)
        assert answer.finish_reason == ("length" if kind == "free" else "stop")
    # Free requests keep several rounds in flight beside the others.
    assert any(count for seen in run.rounds for r, count in seen.in_flight_of.items() if r.startswith("free"))


@on(CHUNKED)
def test_aborted_in_the_middle(engine: EngineProcess, reference: Reference) -> None:
    arrivals, kinds = _mixed(32, seed=72)
    arrivals = [a._replace(abort_after=1 + n % 3) if n % 8 < 4 else a for n, a in enumerate(arrivals)]
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    for kind, text, aborted in zip(kinds, engine.run(driver.texts, run.answers), run.aborted, strict=True):
        if not aborted:
            _check_valid(kind, text)
    assert sum(run.aborted) > 8


@on(LITTLE_KV)
def test_preempted_in_the_middle(engine: EngineProcess, reference: Reference) -> None:
    arrivals, kinds = _mixed(32, seed=74)
    arrivals = [arrival._replace(step=0) for arrival in arrivals]
    run = engine.run(driver.drive, arrivals)
    check(run, arrivals, reference)
    for kind, text in zip(kinds, engine.run(driver.texts, run.answers), strict=True):
        _check_valid(kind, text)
    assert any(not req_id.startswith("free") for seen in run.rounds for req_id in seen.preempted)


def test_drawn_by_chance(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    arrivals, kinds = _mixed(24, seed=73)
    asks = [changed(arrival.ask, temperature=1.5, seed=number) for number, arrival in enumerate(arrivals)]
    found = []
    for args in (CHUNKED.args, {"distributed_executor_backend": EXECUTOR, "max_num_batched_tokens": 64}):
        folder = tmp_path_factory.mktemp("drawn")
        with running(folder, driver.start, model=str(tiny_llama), **SMALL, **args) as process:
            found.append(process.run(driver.generate, asks))
            texts = process.run(driver.texts, found[-1])
    on_two_stages, on_one_stage = found
    assert on_two_stages == on_one_stage
    for kind, text in zip(kinds, texts, strict=True):
        _check_valid(kind, text)
