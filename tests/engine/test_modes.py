"""The executor in its other modes: one stage, and two stages with synchronous scheduling."""

from __future__ import annotations

import pytest

import driver
from engine_process import EngineProcess
from engines import EXECUTOR, Engine, Reference, check, on, two_stages
from requests_and_answers import over_time, with_aborts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# KV space for 18 blocks on each stage; one stage alone has twice as many layers, and so half as many blocks a byte.
LITTLE = {"max_num_batched_tokens": 64, "block_size": 32, "kv_cache_memory_bytes": 18 * 32 * 1024}
ONE_STAGE = Engine(
    "one stage", {"distributed_executor_backend": EXECUTOR, **LITTLE, "kv_cache_memory_bytes": 18 * 32 * 2048}
)
SYNCHRONOUS = two_stages("synchronous", async_scheduling=False, **LITTLE)
ARRIVALS = with_aborts(over_time(seed=41, count=48, longest_prompt=120, most_tokens=60, every=1), seed=41)


@on(ONE_STAGE)
def test_one_stage(engine: EngineProcess, reference: Reference) -> None:
    run = engine.run(driver.drive, ARRIVALS)
    check(run, ARRIVALS, reference)
    assert run.preemptions > 0
    assert not any(seen.handoff for seen in run.rounds)
    # Asynchronous: a request is scheduled again before its token was collected.
    assert any(count for seen in run.rounds for count in seen.in_flight_of.values())


@on(SYNCHRONOUS)
def test_two_stages_with_synchronous_scheduling(engine: EngineProcess, reference: Reference) -> None:
    run = engine.run(driver.drive, ARRIVALS)
    check(run, ARRIVALS, reference)
    assert run.preemptions > 0
    # Two rounds may be in flight, of different requests: one that decodes waits for its token.
    decoding = [seen.in_flight_of[req_id] for seen in run.rounds for req_id, n in seen.scheduled.items() if n == 1]
    assert decoding
    assert not any(decoding)
    assert any(seen.in_flight for seen in run.rounds)
